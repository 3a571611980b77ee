// Command checker answers requests about Go source: does it parse, does it type-check, how does gofmt format it, which
// standard packages does it need. It reads one JSON request per line from standard input and writes one JSON answer per
// line to standard output, in the same order. It never runs or saves the code, and resolves imports from the standard
// library only.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/format"
	"go/importer"
	"go/parser"
	"go/scanner"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
)

type request struct {
	Mode       string `json:"mode"` // parse, types, format or imports
	Code       []byte `json:"code"` // base64
	AutoImport bool   `json:"auto_import"`
	Package    string `json:"package"`   // of code without a package clause
	TestMain   string `json:"test_main"` // imports: new name of a function TestMain
}

type answer struct {
	Syntax  *bool  `json:"syntax"` // null: not checked
	Types   *bool  `json:"types"`
	Line    int    `json:"line"` // of the first error, from 1; 0 without errors
	Message string `json:"message"`
	Text    []byte `json:"text,omitempty"`
	// For "imports": the name of the package, and whether it had a TestMain.
	Package  string `json:"package,omitempty"`
	TestMain bool   `json:"test_main,omitempty"`
}

var yes, no = true, false

func main() {
	requests := json.NewDecoder(bufio.NewReaderSize(os.Stdin, 1<<16))
	output := bufio.NewWriter(os.Stdout)
	answers := json.NewEncoder(output)
	library := newLibrary()
	for {
		var question request
		if err := requests.Decode(&question); err == io.EOF {
			return
		} else if err != nil {
			fmt.Fprintln(os.Stderr, "not a request:", err)
			os.Exit(2)
		}
		if err := answers.Encode(library.answer(question)); err != nil {
			os.Exit(1)
		}
		if err := output.Flush(); err != nil {
			os.Exit(1)
		}
	}
}

func (l *library) answer(question request) (result answer) {
	defer func() { // a panic in go/parser or go/types must not end the process
		if fault := recover(); fault != nil {
			result = answer{Message: fmt.Sprint("the checker failed: ", fault)}
		}
	}()
	source := newSource(question.Code, question.Package)
	if source.err != nil {
		return answer{Syntax: &no, Line: source.line(firstError(source.err)), Message: firstError(source.err).Msg}
	}
	switch question.Mode {
	case "parse":
		return answer{Syntax: &yes}
	case "format":
		text, err := format.Source(question.Code)
		if err != nil {
			return answer{Syntax: &no, Message: err.Error()}
		}
		return answer{Syntax: &yes, Text: text}
	case "imports":
		source, renamed := source.withoutTestMain(question.TestMain)
		if question.AutoImport {
			source.text = l.withImports(source, true)
		}
		return answer{Syntax: &yes, Text: source.text, Package: source.file.Name.Name, TestMain: renamed}
	case "types":
		if question.AutoImport {
			source = newSource(l.withImports(source, false), question.Package)
		}
		return l.check(source)
	}
	return answer{Message: "unknown mode " + strconv.Quote(question.Mode)}
}

// A source is one file, parsed like `gofmt -e`.
type source struct {
	text  []byte // with a package clause
	files *token.FileSet
	file  *ast.File
	err   error
}

// newSource adds a package clause, on the first line of the code, to code that has none.
func newSource(code []byte, packageName string) *source {
	text := code
	if !hasPackageClause(code) {
		text = append([]byte("package "+packageName+"; "), code...)
	}
	s := &source{text: text, files: token.NewFileSet()}
	s.file, s.err = parser.ParseFile(s.files, "", text, parser.ParseComments|parser.AllErrors)
	return s
}

// withoutTestMain renames the function TestMain, unless the new name is empty.
func (s *source) withoutTestMain(name string) (*source, bool) {
	for _, declaration := range s.file.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if ok && name != "" && function.Recv == nil && function.Name.Name == "TestMain" {
			start := s.files.PositionFor(function.Name.Pos(), false).Offset
			text := string(s.text[:start]) + name + string(s.text[start+len("TestMain"):])
			return newSource([]byte(text), ""), true
		}
	}
	return s, false
}

func hasPackageClause(code []byte) bool {
	var tokens scanner.Scanner
	files := token.NewFileSet()
	tokens.Init(files.AddFile("", files.Base(), len(code)), code, func(token.Position, string) {}, 0)
	_, first, _ := tokens.Scan()
	return first == token.PACKAGE
}

func firstError(err error) *scanner.Error {
	var list scanner.ErrorList
	if !errors.As(err, &list) || len(list) == 0 {
		return &scanner.Error{Msg: err.Error()}
	}
	sort.SliceStable(list, func(i, j int) bool { // gofmt's order
		if list[i].Pos.Offset != list[j].Pos.Offset {
			return list[i].Pos.Offset < list[j].Pos.Offset
		}
		return list[i].Msg < list[j].Msg
	})
	return list[0]
}

// line counts newlines, because positions follow //line comments. As in gofmt, the end of a file is on its last line.
func (s *source) line(err *scanner.Error) int {
	offset := err.Pos.Offset
	if offset >= len(s.text) {
		offset = len(bytes.TrimSuffix(s.text, []byte("\n")))
	}
	return 1 + bytes.Count(s.text[:offset], []byte("\n"))
}

// A library is the standard library: the packages that type-checking has read so far, and the paths by package name.
type library struct {
	files    *token.FileSet
	importer types.ImporterFrom
	paths    map[string][]string
}

func newLibrary() *library {
	files := token.NewFileSet()
	return &library{files: files, importer: importer.ForCompiler(files, "source", nil).(types.ImporterFrom)}
}

func (l *library) Import(name string) (*types.Package, error) {
	if !isStandard(name) {
		return nil, errors.New("not in the standard library")
	}
	return l.importer.ImportFrom(name, "", 0)
}

var standardPath = regexp.MustCompile(`^[a-z0-9]+(/[a-z0-9]+)*$`)

func isStandard(name string) bool {
	if name == "unsafe" {
		return true
	}
	if !standardPath.MatchString(name) {
		return false
	}
	info, err := os.Stat(filepath.Join(build.Default.GOROOT, "src", filepath.FromSlash(name)))
	return err == nil && info.IsDir()
}

func (l *library) check(s *source) answer {
	for _, spec := range s.file.Imports {
		if name, err := strconv.Unquote(spec.Path.Value); err == nil && !isStandard(name) {
			return answer{Syntax: &yes, Message: "types not checked: " + name + " is not in the standard library"}
		}
	}
	var found []types.Error
	config := types.Config{Importer: l, Error: func(err error) {
		var problem types.Error
		// A message that begins with a tab continues the error before it ("other declaration of").
		if errors.As(err, &problem) && !strings.HasPrefix(problem.Msg, "\t") {
			found = append(found, problem)
		}
	}}
	config.Check("p", s.files, []*ast.File{s.file}, nil)
	if len(found) == 0 {
		return answer{Syntax: &yes, Types: &yes}
	}
	sort.SliceStable(found, func(i, j int) bool { return found[i].Pos < found[j].Pos })
	position := s.files.PositionFor(found[0].Pos, false)
	return answer{Syntax: &yes, Types: &no, Line: position.Line, Message: found[0].Msg}
}

// withImports adds the standard packages that a source uses without importing them, on the line of its package clause.
// With keepUnused, unused imports become blank imports, which the compiler accepts. Line numbers do not change.
func (l *library) withImports(s *source, keepUnused bool) []byte {
	var clause strings.Builder
	for _, name := range l.missing(s.file) {
		fmt.Fprintf(&clause, "; import %q", name)
	}
	var text []byte
	from := 0
	insert := func(at token.Pos, added string) {
		offset := s.files.PositionFor(at, false).Offset
		text = append(append(text, s.text[from:offset]...), added...)
		from = offset
	}
	insert(s.file.Name.End(), clause.String())
	if keepUnused {
		used := map[string]bool{}
		for _, name := range s.file.Unresolved {
			used[name.Name] = true
		}
		for _, spec := range s.file.Imports {
			if spec.Name == nil && !used[importName(spec)] && spec.Path.Value != `"C"` {
				insert(spec.Path.Pos(), "_ ")
			}
		}
	}
	return append(text, s.text[from:]...)
}

func (l *library) missing(file *ast.File) []string {
	unknown := map[*ast.Ident]bool{}
	for _, name := range file.Unresolved {
		unknown[name] = true
	}
	imported := map[string]bool{}
	for _, spec := range file.Imports {
		imported[importName(spec)] = true
	}
	members := map[string]map[string]bool{}
	ast.Inspect(file, func(node ast.Node) bool {
		if selector, ok := node.(*ast.SelectorExpr); ok && selector.Sel.IsExported() {
			name, ok := selector.X.(*ast.Ident)
			if ok && unknown[name] && !imported[name.Name] {
				if members[name.Name] == nil {
					members[name.Name] = map[string]bool{}
				}
				members[name.Name][selector.Sel.Name] = true
			}
		}
		return true
	})
	var missing []string
	for name, wanted := range members {
		if found := l.resolve(name, wanted); found != "" {
			missing = append(missing, found)
		}
	}
	sort.Strings(missing)
	return missing
}

func importName(spec *ast.ImportSpec) string {
	if spec.Name != nil {
		return spec.Name.Name
	}
	name, _ := strconv.Unquote(spec.Path.Value)
	return packageName(name)
}

var version = regexp.MustCompile(`^v[0-9]+$`)

func packageName(importPath string) string {
	if version.MatchString(path.Base(importPath)) {
		importPath = path.Dir(importPath)
	}
	return path.Base(importPath)
}

// resolve finds the path for a package name: among several, the first that has all wanted names.
func (l *library) resolve(name string, wanted map[string]bool) string {
	if l.paths == nil { // read once, because it takes about 20 ms
		l.paths = standardPaths()
	}
	candidates := l.paths[name]
	if len(candidates) == 0 {
		return ""
	}
	if len(candidates) > 1 {
		for _, candidate := range candidates {
			if l.has(candidate, wanted) {
				return candidate
			}
		}
	}
	return candidates[0]
}

func (l *library) has(name string, wanted map[string]bool) bool {
	found, err := l.Import(name)
	if err != nil {
		return false
	}
	for member := range wanted {
		if found.Scope().Lookup(member) == nil {
			return false
		}
	}
	return true
}

// Packages that are far more common than their namesakes (crypto/rand, html/template, net/http/pprof).
var preferred = map[string]bool{"math/rand": true, "text/template": true, "runtime/pprof": true}

func standardPaths() map[string][]string {
	root, err := filepath.EvalSymlinks(filepath.Join(build.Default.GOROOT, "src"))
	if err != nil {
		return nil
	}
	paths := map[string][]string{"unsafe": {"unsafe"}}
	// An unreadable directory has no package to import.
	filepath.WalkDir(root, func(full string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() || full == root {
			return nil
		}
		switch entry.Name() {
		case "cmd", "vendor", "internal", "testdata", "builtin":
			return filepath.SkipDir
		}
		if sources, _ := filepath.Glob(filepath.Join(full, "*.go")); len(sources) > 0 {
			relative, _ := filepath.Rel(root, full)
			name := filepath.ToSlash(relative)
			if standardPath.MatchString(name) && name != "unsafe" {
				paths[packageName(name)] = append(paths[packageName(name)], name)
			}
		}
		return nil
	})
	for _, list := range paths {
		sort.SliceStable(list, func(i, j int) bool { return rank(list[i]) < rank(list[j]) })
	}
	return paths
}

func rank(name string) string {
	if preferred[name] {
		return ""
	}
	return fmt.Sprint(strings.Count(name, "/"), name)
}
