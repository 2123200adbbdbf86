//go:build !agent

// Remembers what a test of Istio configures. Added to package core of a copy of Istio.

package core

import (
	"sync"

	"istio.io/istio/pkg/test"
)

var given sync.Map

// NewConfigGenTest stands before the function of Istio.
func NewConfigGenTest(t test.Failer, opts TestOptions) *ConfigGenTest {
	s := istioNewConfigGenTest(t, opts)
	given.Store(s, opts)
	t.Cleanup(func() { given.Delete(s) })
	return s
}

// GivenOptions returns the options with which a test has created s.
func GivenOptions(s *ConfigGenTest) TestOptions {
	opts, _ := given.Load(s)
	return opts.(TestOptions)
}
