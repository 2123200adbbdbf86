// Command fortio reads a result with Fortio's own types, or runs Fortio. It is the peer of tests/fortio.rs.
//
//	fortio read FILE                prints what Fortio's types hold of a result
//	fortio load|report|server ...   is Fortio
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"fortio.org/fortio/cli"
	"fortio.org/fortio/fgrpc"
	"fortio.org/fortio/fhttp"
	"fortio.org/fortio/periodic"
	"fortio.org/fortio/tcprunner"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "read" {
		if err := read(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	cli.FortioMain(nil)
}

func read(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var common periodic.RunnerResults
	if err := json.Unmarshal(text, &common); err != nil {
		return err
	}
	result, err := ofType(common.RunType)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, result); err != nil {
		return err
	}
	histogram := result.Result().DurationHistogram
	var inBuckets int64
	for _, bucket := range histogram.Data {
		inBuckets += bucket.Count
	}
	summary := map[string]any{
		"result":  result,
		"year":    result.Result().StartTime.Year(),
		"buckets": inBuckets,
		"p50":     histogram.CalcPercentile(50),
	}
	return json.NewEncoder(os.Stdout).Encode(summary)
}

// ofType returns an empty result of the type that Fortio uses for this RunType.
func ofType(runType string) (periodic.HasRunnerResult, error) {
	switch {
	case runType == "HTTP":
		return &fhttp.HTTPRunnerResults{}, nil
	case strings.HasPrefix(runType, "GRPC "):
		return &fgrpc.GRPCRunnerResults{}, nil
	case runType == "TCP":
		return &tcprunner.RunnerResults{}, nil
	}
	return nil, fmt.Errorf("RunType %q is unknown", runType)
}
