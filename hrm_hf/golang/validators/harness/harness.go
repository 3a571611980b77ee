// Package harness says to whoever started a test binary that all of its tests have run to their end and none failed:
// it writes a line with the word that it read from standard input before anything of the tested package ran. A test
// binary that ends itself, runs fewer tests or prints "PASS" does not write that line.
package harness

import (
	"reflect"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"unsafe"
)

// Main is the TestMain of the tests, if they have one.
var Main func(*testing.M)

var word = readWord()

// readWord leaves standard input empty, so that nobody reads it again.
func readWord() []byte {
	found := make([]byte, 0, 64)
	for len(found) < cap(found) {
		count, err := syscall.Read(0, found[len(found):cap(found)])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || count <= 0 {
			break
		}
		found = found[:len(found)+count]
	}
	if null, err := syscall.Open("/dev/null", syscall.O_RDONLY, 0); err == nil {
		syscall.Dup3(null, 0, 0)
		syscall.Close(null)
	}
	return found
}

// Run is what TestMain does. The line comes when the last test ends, as a TestMain may end the process after it.
func Run(m *testing.M) {
	field := reflect.ValueOf(m).Elem().FieldByName("tests")
	if !field.IsValid() {
		panic("hrm_hf cannot watch the tests of " + runtime.Version() + ": testing.M has no field tests")
	}
	tests := *(*[]testing.InternalTest)(unsafe.Pointer(field.UnsafeAddr()))
	var lock sync.Mutex
	open, passed, failed := len(tests), false, false
	for index := range tests {
		test, ended := tests[index].F, false
		tests[index].F = func(t *testing.T) {
			returned := false // neither by a panic nor by runtime.Goexit
			t.Cleanup(func() {
				lock.Lock()
				defer lock.Unlock()
				if t.Failed() || !(returned || t.Skipped()) {
					failed = true
				}
				passed = passed || !t.Skipped()
				if !ended {
					ended = true
					open--
				}
				if open == 0 && passed && !failed {
					syscall.Write(1, append([]byte("\n"), append(word, '\n')...))
					passed = false
				}
			})
			test(t)
			returned = true
		}
	}
	if Main != nil {
		Main(m)
	} else {
		m.Run()
	}
}
