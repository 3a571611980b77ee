// Package harness reports that all tests of a test binary have run to their end and none failed: it writes a line with
// the secret that it read from standard input before any code of the tested package ran. A test binary that exits early,
// runs fewer tests or prints "PASS" does not write that line.
package harness

import (
	"reflect"
	"runtime"
	"sync"
	"syscall"
	"testing"
	_ "time/tzdata" // a sandbox has no /usr/share/zoneinfo
	"unsafe"
)

// Main is the TestMain of the tests, if they have one.
var Main func(*testing.M)

var secret = readSecret()

// readSecret leaves standard input empty, so that no other code can read the secret.
func readSecret() []byte {
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

// Run is the TestMain. It writes the line when the last test ends, because Main may exit the process after that.
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
			returned := false // stays false after a panic or runtime.Goexit
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
					syscall.Write(1, append([]byte("\n"), append(secret, '\n')...))
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
