"""Functions as records. Referees: hand-written files; go/parser's own reading of them where Go is installed."""

import subprocess
from shutil import which

import pytest

from hrm_hf.golang.data.functions import function_records
from hrm_hf.golang.data.options import BuildGo
from hrm_hf.golang.data.records import validate_record
from hrm_hf.golang.data.sources import Dropped, find_go_source, go_files
from hrm_hf.hub.licenses import license_of, license_of_text


FILE = """// Copyright. SPDX-License-Identifier: MIT

package shop // import "example.com/shop"

import (
\t"errors"
\t"fmt"
)

const tax = 19 // per cent
// Price returns the price with tax, e.g. 119 for 100. It fails
// for negative amounts.
//
//\tPrice(100)
//
//go:noinline
func Price(amount int) (int, error) {
\tif amount < 0 {
\t\treturn 0, errors.New("negative")
\t}
\treturn amount + amount*tax/100, nil
}

// A Stack is a list of things, the last of them on top.
type Stack[T any] struct {
\titems []T
}

/*
Push puts a thing on top of the stack.
*/
func (s *Stack[T]) Push(item T) {
\ts.items = append(s.items, item)
\tfmt.Println("ü", len(s.items))
}

// Far away comment, with an empty line below it.

func undocumented() {
\tfmt.Println(1)
\tfmt.Println(2)
}

// Short has a doc comment long enough.
func Short() int { return 1 }

// Asm is written in another language.
func Asm(x int)

// Brief doc.
func brief() {
\tfmt.Println(1)
\tfmt.Println(2)
}

type (
\t// One of two types in one declaration.
\tA int
\tB int
)

// Shape is what has an area and a name for it.
type Shape interface {
\tArea() float64
\tName() string
}
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "go.mod").write_text("module example.com/shop\n\ngo 1.19\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "shop.go").write_text(FILE)
    return tmp_path


def records_of(tree, dropped=None, **options):
    options = BuildGo(sources=[str(tree)], out=tree / "out", **options)
    return list(function_records(tree, options, Dropped() if dropped is None else dropped))


def by_name(tree, **options):
    records = records_of(tree, **options)
    for record in records:
        validate_record(record)
    return {record["id"].rpartition(":")[2]: record for record in records}


def test_a_function_is_a_problem_a_prefix_and_a_solution(tree):
    record = by_name(tree)["Price"]
    assert record["id"] == "example.com/shop/inner/shop.go:17:Price"
    assert (record["group"], record["licence"], record["source"]) == ("example.com/shop/inner", "MIT", tree.name)
    assert record["problem"]["title"] == "Price returns the price with tax, e.g. 119 for 100."
    assert record["problem"]["body"] == "It fails\nfor negative amounts.\n\n\tPrice(100)"
    assert record["code_prefix"] == "func Price(amount int) (int, error) {"
    assert record["solution"]["code"].endswith("\treturn amount + amount*tax/100, nil\n}")
    assert record["plan"]["targets"] == ["func:Price"]
    assert record["attempts"] == []


def test_a_method_comes_with_the_type_of_its_receiver(tree):
    record = by_name(tree)["Stack.Push"]
    assert record["plan"]["targets"] == ["method:Stack.Push"]
    assert record["problem"]["title"] == "Push puts a thing on top of the stack."
    assert record["context"]["path"] == "inner/shop.go"
    assert record["context"]["before"] == "package shop\n\ntype Stack[T any] struct {\n\titems []T\n}\n"


@pytest.mark.parametrize("context, has_type, has_imports", [("none", 0, 0), ("type", 1, 0), ("file", 1, 1)])
def test_context_is_what_was_asked_for(tree, context, has_type, has_imports):
    before = by_name(tree, context=context)["Stack.Push"]["context"]["before"]
    assert ("type Stack[T any]" in before, '"errors"' in before) == (bool(has_type), bool(has_imports))


def test_what_is_too_little_is_left_out_and_counted(tree):
    dropped, line = Dropped(), FILE[: FILE.index("func undocumented")].count("\n") + 1
    assert set(by_name(tree, dropped=dropped)) == {"Price", "Stack.Push"}
    assert dropped.counts == {
        "no doc comment": 1,
        "no body": 1,
        "fewer than 2 body lines": 1,
        "doc comment below 20 characters": 1,
    }
    assert dropped.examples["no doc comment"] == [f"inner/shop.go:{line}"]
    assert set(by_name(tree, min_body_lines=1, min_doc_characters=5)) == {"Price", "Stack.Push", "Short", "brief"}


def test_types_are_records_if_asked_for(tree):
    records = by_name(tree, types=True, min_body_lines=1)
    assert records["Shape"]["plan"]["targets"] == ["interface:Shape"]
    assert records["Shape"]["code_prefix"] == "type Shape interface {"
    assert records["Stack"]["plan"]["targets"] == ["type:Stack"]
    assert records["Stack"]["code_prefix"] == "type Stack[T any] struct {"
    assert "A" not in records


def test_the_module_is_the_group_by_repository(tree):
    assert by_name(tree, split_by="repository")["Price"]["group"] == "example.com/shop"


def test_functions_that_do_not_parse_are_left_out(tree):
    broken = "package a\n\n// Broken is a function that nobody can parse.\nfunc Broken() {\n\tx := (1\n\ty := 2\n}\n"
    (tree / "broken.go").write_text(broken)
    dropped = Dropped()
    assert "Broken" not in by_name(tree, dropped=dropped)
    assert dropped.counts["syntax error"] == 1


def test_files_that_nobody_typed_are_skipped_by_name_and_reason(tree):
    (tree / "vendor" / "x").mkdir(parents=True)
    (tree / "vendor" / "x" / "x.go").write_text(FILE)
    (tree / "a_test.go").write_text(FILE)
    (tree / "generated.go").write_text(f"// Code generated by stringer. DO NOT EDIT.\n\n{FILE}")
    (tree / "latin.go").write_bytes(b"package a // \xe9\n")
    (tree / "nul.go").write_bytes(b"package a // \x00\n")
    (tree / "empty.go").write_text("\n")
    (tree / "line.go").write_text("package a\n\nvar x = `" + "x" * 900_000 + "`\n")
    (tree / "huge.go").write_text("package a\n\nvar x = `" + "x" * 10_000_000 + "`\n")
    (tree / "gone.go").symlink_to(tree / "nowhere.go")
    dropped = Dropped()
    assert [file.name for file in go_files(tree, dropped)] == ["inner/shop.go"]
    assert dropped.examples == {
        "folder vendor, testdata or hidden": ["vendor"],
        "test file": ["a_test.go"],
        "generated": ["generated.go"],
        "not UTF-8": ["latin.go"],
        "NUL character": ["nul.go"],
        "empty": ["empty.go"],
        "line of more than 5000 characters": ["line.go"],
        "more than 1000000 bytes": ["huge.go"],
        "unreadable": ["gone.go"],
    }


def test_packages_of_a_tree_without_modules_are_its_folders(tmp_path):
    folder = tmp_path / "github.com" / "owner" / "repo" / "pkg"
    folder.mkdir(parents=True)
    (folder / "a.go").write_text("package pkg\n")
    (file,) = go_files(tmp_path)
    assert (file.package, file.module) == ("github.com/owner/repo/pkg", "github.com/owner/repo")


def test_packages_of_the_standard_library_have_no_module_before_them(tmp_path):
    (tmp_path / "go.mod").write_text("module std\n")
    (tmp_path / "net" / "http").mkdir(parents=True)
    (tmp_path / "net" / "http" / "a.go").write_text("package http\n")
    (file,) = go_files(tmp_path)
    assert (file.package, file.module) == ("net/http", "std")


@pytest.mark.parametrize(
    "text, name",
    [
        ("Permission is hereby granted, free of charge, to any person obtaining a copy", "MIT"),
        ("                 Apache License\n           Version 2.0, January 2004", "Apache-2.0"),
        ("Redistribution and use in source and binary forms ... Neither the name", "BSD-3-Clause"),
        ("Redistribution and use in source and binary forms, with or without", "BSD-2-Clause"),
        ("GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007", "GPL-3.0"),
        ("All rights reserved.", "unknown"),
    ],
)
def test_a_licence_is_known_by_its_words(tmp_path, text, name):
    (tmp_path / "LICENSE").write_text(text)
    assert license_of_text(text) == license_of(tmp_path) == name


@pytest.mark.external
@pytest.mark.skipif(which("gofmt") is None, reason="gofmt is not installed")
def test_gofmt_accepts_the_functions_of_a_package(tmp_path):
    try:
        root = find_go_source() / "strings"
    except FileNotFoundError as error:
        pytest.skip(str(error))
    records = records_of(root)
    assert len(records) > 50
    code = "package strings\n\n" + "\n\n".join(record["solution"]["code"] for record in records) + "\n"
    (tmp_path / "all.go").write_text(code)
    run = subprocess.run(["gofmt", "-e", "-l", str(tmp_path / "all.go")], capture_output=True, text=True)
    # -l names files that are not formatted as gofmt does: none, so nothing was cut off or moved
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
