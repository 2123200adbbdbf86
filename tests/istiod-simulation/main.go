// Command istiod-simulation runs the simulation tests of istiod on the resources of Skysail's control plane.
//
//	go run -C tests/istiod-simulation . [-skysail PROGRAM] [-run TEST]
//
// The tests are tables of objects, calls, and what Envoy does with each call, in files *_simulation_test.go of Istio. They run
// in a copy of Istio in the user's cache. There the functions that ask istiod's compile step ask `skysail control` instead, over
// xDS (testdata). The tables are unchanged.
//
// differences.txt lists the checks whose result differs, each with a reason. The run fails on other differences, on entries
// without a difference, and on another number of checks.
package main

import (
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Version of Istio, which test.sh uses too.
const istio = "v0.0.0-20260827124520-eed52ebb66ad"

// Packages with simulation tests.
var packages = []string{"pilot/pkg/networking/core", "pilot/pkg/networking/core/loadbalancer"}

//go:embed testdata/core.go
var coreText string

//go:embed testdata/xds.go
var xdsText string

//go:embed testdata/simulation.go
var simulationText string

// A part of the harness: a file that is added to a package, and the functions of a file that it stands before.
type part struct {
	added, text string
	file        string
	functions   []string
}

var parts = []part{
	{"pilot/pkg/networking/core/skysail.go", coreText, "pilot/pkg/networking/core/fake.go", []string{"NewConfigGenTest"}},
	{"pilot/test/xds/skysail.go", xdsText, "pilot/test/xds/fake.go", []string{"NewFakeDiscoveryServer"}},
	{
		"pilot/pkg/simulation/skysail.go", simulationText, "pilot/pkg/simulation/traffic.go",
		[]string{"NewSimulation", "NewSimulationFromConfigGen"},
	},
}

func main() {
	skysail := flag.String("skysail", "", "path of the program `skysail` (default: the debug build of the tree)")
	only := flag.String("run", "", "run only the tests that this expression of `go test` selects; the list is not compared")
	flag.Parse()
	if err := run(*skysail, *only); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(skysail, only string) error {
	known, err := readDifferences()
	if err != nil {
		return err
	}
	program, err := programOf(skysail)
	if err != nil {
		return err
	}
	folder, err := prepare()
	if err != nil {
		return err
	}
	selected := only
	if selected == "" {
		if selected, err = simulationTests(folder); err != nil {
			return err
		}
	}
	results, err := test(folder, selected, program)
	if err != nil {
		return err
	}
	return report(results, known, only == "")
}

// Returns the absolute path of the program, so that it does not depend on the folder of a test.
func programOf(skysail string) (string, error) {
	if skysail == "" {
		target := os.Getenv("CARGO_TARGET_DIR")
		if target == "" {
			target = "../../target"
		}
		skysail = filepath.Join(target, "debug", "skysail")
	}
	program, err := filepath.Abs(skysail)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(program); err != nil {
		return "", fmt.Errorf("%w; build it with `cargo build -p skysail`, or name it with -skysail", err)
	}
	return program, nil
}

// Makes the copy of Istio, once, and puts the harness into it. Files below the module cache cannot be replaced by an overlay.
func prepare() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	source, err := moduleOf(istio)
	if err != nil {
		return "", err
	}
	folder := filepath.Join(cache, "skysail", "istio-"+istio[strings.LastIndex(istio, "-")+1:])
	if _, err := os.Stat(folder); errors.Is(err, os.ErrNotExist) {
		// A copy that was cut off does not count.
		unfinished := folder + ".part"
		if err := os.RemoveAll(unfinished); err != nil {
			return "", err
		}
		if err := os.CopyFS(unfinished, os.DirFS(source)); err != nil {
			return "", err
		}
		if err := os.Rename(unfinished, folder); err != nil {
			return "", err
		}
	}
	for _, part := range parts {
		text, err := os.ReadFile(filepath.Join(source, part.file))
		if err != nil {
			return "", err
		}
		patched := string(text)
		for _, function := range part.functions {
			if strings.Count(patched, "\nfunc "+function+"(") != 1 {
				return "", fmt.Errorf("Istio's %s has no function %s; adapt the harness", part.file, function)
			}
			patched = strings.Replace(patched, "\nfunc "+function+"(", "\nfunc istio"+function+"(", 1)
		}
		if err := os.WriteFile(filepath.Join(folder, part.file), []byte(patched), 0o644); err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(folder, part.added), []byte(part.text), 0o644); err != nil {
			return "", err
		}
	}
	return folder, nil
}

// Returns the folder of Istio's module, which is fetched once.
func moduleOf(version string) (string, error) {
	command := exec.Command("go", "mod", "download", "-json", "istio.io/istio@"+version)
	command.Stderr = os.Stderr
	output, err := command.Output()
	var module struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(output, &module); err == nil {
		err = jsonErr
	}
	if err != nil || module.Error != "" {
		return "", fmt.Errorf("istio.io/istio cannot be fetched (the Go module proxy is needed once): %v %s", err, module.Error)
	}
	return module.Dir, nil
}

// Returns the expression that selects the simulation tests.
func simulationTests(folder string) (string, error) {
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	var names []string
	for _, of := range packages {
		files, err := filepath.Glob(filepath.Join(folder, of, "*_simulation_test.go"))
		if err != nil {
			return "", err
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			for _, found := range function.FindAllSubmatch(text, -1) {
				names = append(names, string(found[1]))
			}
		}
	}
	if len(names) == 0 {
		return "", errors.New("Istio has no simulation tests; adapt the harness")
	}
	return "^(" + strings.Join(names, "|") + ")$", nil
}
