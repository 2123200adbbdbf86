// Remembers what a test of Istio configures. Added to package xds (pilot/test/xds) of a copy of Istio.

package xds

import (
	"sync"

	"istio.io/istio/pkg/test"
)

var given sync.Map

// NewFakeDiscoveryServer stands before the function of Istio.
func NewFakeDiscoveryServer(t test.Failer, opts FakeOptions) *FakeDiscoveryServer {
	s := istioNewFakeDiscoveryServer(t, opts)
	given.Store(s, opts)
	t.Cleanup(func() { given.Delete(s) })
	return s
}

// GivenOptions returns the options with which a test has created s.
func GivenOptions(s *FakeDiscoveryServer) FakeOptions {
	opts, _ := given.Load(s)
	return opts.(FakeOptions)
}
