package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

// Result of a check: a test without subtests, or one that fails by itself.
type result struct {
	name   string
	failed bool
	output []string
}

// Line of `go test -json`.
type event struct {
	Action, Test, Output string
}

// Runs the tests. Returns the results of all checks, in the order of their names.
func test(folder, selected, program string) ([]result, error) {
	arguments := []string{"test", "-json", "-vet=off", "-count=1", "-timeout=60m", "-run", selected}
	for _, of := range packages {
		arguments = append(arguments, "./"+of)
	}
	command := exec.Command("go", arguments...)
	command.Dir = folder
	command.Stderr = os.Stderr
	command.Env = append(os.Environ(), "SKYSAIL="+program, "SIMULATION_DEBUG=false")
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("go does not start: %w", err)
	}
	tests := map[string]*result{}
	var others []string
	isBuilt := true
	lines := bufio.NewScanner(output)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var line event
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Test == "" {
			others = append(others, line.Output)
			isBuilt = isBuilt && line.Action != "build-fail"
			continue
		}
		of := tests[line.Test]
		if of == nil {
			of = &result{name: line.Test, failed: true}
			tests[line.Test] = of
		}
		switch line.Action {
		case "output":
			of.output = append(of.output, line.Output)
		case "pass", "skip":
			of.failed = false
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	// A failed test ends `go test` with an error too.
	if err := command.Wait(); err != nil && (len(tests) == 0 || !isBuilt) {
		return nil, fmt.Errorf("the tests cannot be built: %w\n%s", err, strings.Join(others, ""))
	}
	return checks(tests), nil
}

// Returns those tests that are checks. A test that has subtests counts only if it fails and none of them does.
func checks(tests map[string]*result) []result {
	hasSubtests, explained := map[string]bool{}, map[string]bool{}
	for name, of := range tests {
		for at := strings.LastIndexByte(name, '/'); at >= 0; at = strings.LastIndexByte(name[:at], '/') {
			hasSubtests[name[:at]] = true
			explained[name[:at]] = explained[name[:at]] || of.failed
		}
	}
	var found []result
	for name, of := range tests {
		if hasSubtests[name] && (!of.failed || explained[name]) {
			continue
		}
		// The control plane serves all calls of a simulation, so what it says is with the test above them.
		for at := strings.LastIndexByte(name, '/'); at >= 0; at = strings.LastIndexByte(name[:at], '/') {
			// A slash may also be a part of a name.
			above := tests[name[:at]]
			if above == nil {
				continue
			}
			for _, line := range above.output {
				if strings.Contains(line, "skysail: ERROR") {
					of.output = append(of.output, line)
				}
			}
		}
		found = append(found, *of)
	}
	slices.SortFunc(found, func(a, b result) int { return strings.Compare(a.name, b.name) })
	return found
}

// Prints the results by test, and each check that differs. Fails unless they are those that the list expects.
func report(results []result, known differences, isComplete bool) error {
	type count struct{ checks, agree int }
	counts := map[string]*count{}
	var all count
	var tests, unknown []string
	listed := map[string]bool{}
	for _, of := range results {
		test, _, _ := strings.Cut(of.name, "/")
		if counts[test] == nil {
			counts[test] = &count{}
			tests = append(tests, test)
		}
		counts[test].checks++
		all.checks++
		if !of.failed {
			counts[test].agree++
			all.agree++
			continue
		}
		reason, isKnown := known.reasons[of.name]
		listed[of.name] = true
		if !isKnown {
			reason = "NOT LISTED\n" + messages(of.output)
			unknown = append(unknown, of.name)
		}
		fmt.Printf("differs  %s: %s\n", of.name, reason)
	}
	for _, test := range tests {
		fmt.Printf("%4d of %4d agree  %s\n", counts[test].agree, counts[test].checks, test)
	}
	fmt.Printf("%4d of %4d agree\n", all.agree, all.checks)
	if len(unknown) > 0 {
		return fmt.Errorf("%d differences are not listed in differences.txt", len(unknown))
	}
	if !isComplete {
		return nil
	}
	for name := range known.reasons {
		if !listed[name] {
			unknown = append(unknown, name)
		}
	}
	if slices.Sort(unknown); len(unknown) > 0 {
		return fmt.Errorf("differences.txt lists what does not differ:\n%s", strings.Join(unknown, "\n"))
	}
	if all.checks != known.checks {
		return fmt.Errorf("there are %d checks, and differences.txt expects %d", all.checks, known.checks)
	}
	return nil
}

// Message of a test. Further lines of it, such as a diff of all fields, are left out.
var message = regexp.MustCompile(`^\s+\w+\.go:\d+: (.+)`)

// Line of istiod's log, or of the framework.
var frame = regexp.MustCompile(`^(\d{4}-\d\d-\d\dT|\s*(===|---) )`)

// Returns what a test says: each message once, or all of the text if it has no other message than a diff.
func messages(output []string) string {
	var lines, text []string
	for _, line := range output {
		if frame.MatchString(line) {
			continue
		}
		text = append(text, strings.TrimRight(line, "\n"))
		found := message.FindStringSubmatch(line)
		if found == nil || strings.Contains(found[1], "Diff: ") || slices.Contains(lines, found[1]) {
			continue
		}
		lines = append(lines, found[1])
	}
	if len(lines) == 0 {
		lines = text
	}
	return "    " + strings.Join(lines, "\n    ")
}
