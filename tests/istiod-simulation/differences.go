package main

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

//go:embed differences.txt
var list string

// Kinds of reasons.
var kinds = []string{"deliberate", "harness", "missing"}

// Content of differences.txt.
type differences struct {
	// Number of all checks.
	checks int
	// Reason of each check that differs.
	reasons map[string]string
}

// Reads the list. Each group begins with its reason, as `[KIND] REASON`. The names of its checks follow, one a line.
func readDifferences() (differences, error) {
	known := differences{reasons: map[string]string{}}
	reason := ""
	for number, line := range strings.Split(list, "\n") {
		fail := func(problem string) (differences, error) {
			return differences{}, fmt.Errorf("differences.txt:%d: %s: %s", number+1, problem, line)
		}
		switch line = strings.TrimSpace(line); {
		case line == "" || line[0] == '#':
		case strings.HasPrefix(line, "checks: "):
			checks, err := strconv.Atoi(strings.TrimPrefix(line, "checks: "))
			if err != nil {
				return fail("no number")
			}
			known.checks = checks
		case line[0] == '[':
			kind, text, _ := strings.Cut(line[1:], "]")
			if !slices.Contains(kinds, kind) || strings.TrimSpace(text) == "" {
				return fail("a reason is [KIND] REASON, with one of the kinds " + strings.Join(kinds, ", "))
			}
			reason = line
		case reason == "":
			return fail("this check has no reason")
		case known.reasons[line] != "":
			return fail("this check is listed twice")
		default:
			known.reasons[line] = reason
		}
	}
	return known, nil
}
