// Package assert is a stand-in for testify with only the calls in the tests of HumanEvalPack, so that they build offline.
package assert

import (
	"bytes"
	"reflect"
)

// TestingT receives failed assertions.
type TestingT interface {
	Errorf(format string, args ...interface{})
	Helper()
}

// Assertions belong to one test.
type Assertions struct {
	t TestingT
}

// New returns the assertions of t.
func New(t TestingT) *Assertions {
	return &Assertions{t}
}

// Equal reports whether expected and actual are deeply equal, of the same type, and fails the test if not.
// Byte slices are compared by content, as in testify.
func (a *Assertions) Equal(expected, actual interface{}, _ ...interface{}) bool {
	a.t.Helper()
	equal := reflect.DeepEqual(expected, actual)
	if want, ok := expected.([]byte); ok {
		if have, ok := actual.([]byte); ok && want != nil && have != nil {
			equal = bytes.Equal(want, have)
		}
	}
	if !equal {
		a.t.Errorf("not equal: expected %#v, got %#v", expected, actual)
	}
	return equal
}
