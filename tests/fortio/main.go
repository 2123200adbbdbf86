// Command fortio reads a result with Fortio's own types, or runs Fortio. It is the peer of tests/fortio.rs.
//
//	fortio read FILE         prints what Fortio's types hold of a result
//	fortio load|server ...   is Fortio
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"fortio.org/fortio/cli"
	"fortio.org/fortio/fhttp"
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
	var result fhttp.HTTPRunnerResults
	if err := json.Unmarshal(text, &result); err != nil {
		return err
	}
	histogram := result.DurationHistogram
	var inBuckets int64
	for _, bucket := range histogram.Data {
		inBuckets += bucket.Count
	}
	summary := map[string]any{
		"type":        result.RunType,
		"labels":      result.Labels,
		"year":        result.StartTime.Year(),
		"qps":         result.RequestedQPS,
		"actual":      result.ActualQPS,
		"seconds":     result.ActualDuration.Seconds(),
		"connections": result.NumThreads,
		"codes":       result.RetCodes,
		"url":         result.URL,
		"sockets":     result.SocketCount,
		"count":       histogram.Count,
		"buckets":     inBuckets,
		"p50":         histogram.CalcPercentile(50),
		"percentiles": len(histogram.Percentiles),
		"size":        result.Sizes.Avg,
	}
	return json.NewEncoder(os.Stdout).Encode(summary)
}
