// Package conformance runs the conformance suite of Gateway API; `run` in this folder says how.
package conformance

import (
	"testing"

	"sigs.k8s.io/gateway-api/conformance"
)

func TestConformance(t *testing.T) { conformance.RunConformance(t) }
