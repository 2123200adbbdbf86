package main

import (
	"slices"
	"strings"
	"testing"
)

func TestChecksAreLeavesAndTestsThatFailByThemselves(t *testing.T) {
	tests := map[string]*result{}
	for _, of := range []result{
		{name: "A", failed: true}, {name: "A/b", failed: true, output: []string{"skysail: ERROR why"}},
		{name: "A/b/c", failed: true}, {name: "A/b/d"}, {name: "B", failed: true}, {name: "B/c"}, {name: "C"},
		{name: "D", failed: true}, {name: "D/with/slash", failed: true},
	} {
		tests[of.name] = &of
	}
	var names []string
	for _, of := range checks(tests) {
		names = append(names, of.name)
		if of.name == "A/b/c" && !slices.Contains(of.output, "skysail: ERROR why") {
			t.Errorf("the output of the simulation is missing: %v", of.output)
		}
	}
	if want := []string{"A/b/c", "A/b/d", "B", "B/c", "C", "D/with/slash"}; !slices.Equal(names, want) {
		t.Errorf("%v, not %v", names, want)
	}
}

func TestOnlyListedDifferencesAreAccepted(t *testing.T) {
	results := []result{{name: "A/b", failed: true}, {name: "A/c"}}
	of := func(checks int, names ...string) differences {
		known := differences{checks, map[string]string{}}
		for _, name := range names {
			known.reasons[name] = "[deliberate] a reason"
		}
		return known
	}
	for _, one := range []struct {
		known differences
		want  string
	}{
		{of(2, "A/b"), ""},
		{of(2), "1 differences are not listed"},
		{of(2, "A/b", "A/c"), "lists what does not differ:\nA/c"},
		{of(2, "A/b", "A/gone"), "lists what does not differ:\nA/gone"},
		{of(3, "A/b"), "there are 2 checks"},
	} {
		err := report(results, one.known, true)
		if found := err != nil && strings.Contains(err.Error(), one.want); found != (one.want != "") {
			t.Errorf("%v, not %q", err, one.want)
		}
	}
	if err := report(results[:1], of(2, "A/b", "A/gone"), false); err != nil {
		t.Errorf("a part of the checks is not compared with the list: %v", err)
	}
}

func TestTheListIsInItsForm(t *testing.T) {
	known, err := readDifferences()
	if err != nil || known.checks == 0 {
		t.Errorf("%d checks, %v", known.checks, err)
	}
}
