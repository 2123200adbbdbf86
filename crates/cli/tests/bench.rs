//! `skysail bench`: one short baseline, its result file, its errors; a short comparison; [`scenarios`].

#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "bench/scenarios.rs"]
mod scenarios;

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn bench(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_skysail"))
        .arg("bench")
        .args(arguments)
        .current_dir(folder)
        .env_remove("SKYSAIL_ENVOY")
        .output()
        .unwrap()
}

/// Returns the only file in the folder whose name has this prefix.
fn the_file(folder: &Path, prefix: &str) -> PathBuf {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(prefix);
    let files: Vec<PathBuf> = files.filter(named).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

#[test]
fn half_a_second_of_baseline_gives_a_result_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "latency --peers skysail --topologies baseline --connections 2,4 --qps 200 --seconds 0.5 --warmup 0.1 \
                     --rounds 1 --output json --no-realtime";
    let output = bench(folder.path(), &arguments.split_whitespace().collect::<Vec<_>>());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("[2/2, 0 s left] round 1, 4 connections, baseline"), "{errors}");

    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let written = std::fs::read(the_file(folder.path(), "skysail-bench-latency-")).unwrap();
    assert_eq!(printed, serde_json::from_slice::<serde_json::Value>(&written).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    assert_eq!(printed["benchmark"], "latency");
    assert_eq!(printed["interrupted"], false);
    let busy = &printed["machine"]["busy"];
    assert!(busy["cores"].as_f64().unwrap() <= busy["of"].as_f64().unwrap(), "{busy}");
    let runs = printed["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        assert_eq!((&run["requests"], &run["unanswered"]), (&100.into(), &0.into()), "{run}");
        let latency = |name: &str| run["latency_us"][name].as_f64().unwrap();
        assert!(0.0 < latency("p50") && latency("p50") <= latency("p99") && latency("p99") <= latency("max"));
        assert!(run["parts"]["client"]["cpu_us_per_request"].as_f64().unwrap() > 0.0, "{run}");
        assert!(run["parts"]["server"]["rss_kb"].as_u64().unwrap() > 0, "{run}");
    }
    assert_eq!(printed["summary"][1]["connections"], 4);
}

#[test]
fn a_peer_that_is_not_installed_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(folder.path(), &["latency", "--peers", "envoy", "--envoy", "no-such-envoy"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.starts_with("skysail: --envoy no-such-envoy: "), "{errors}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_result_that_cannot_be_written_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    std::fs::create_dir(&taken).unwrap();
    for result in ["no/such/folder/result.json", "taken"] {
        let output = bench(folder.path(), &["latency", "--peers", "skysail", "--result", result]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.starts_with(&format!("skysail: --result {result}: ")), "{errors}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn an_earlier_result_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let earlier = folder.path().join("earlier.json");
    std::fs::write(&earlier, "earlier").unwrap();
    for benchmark in ["latency", "compare", "control", "dns"] {
        let output = bench(folder.path(), &[benchmark, "--result", "earlier.json"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains("--result earlier.json: the file exists"), "{errors}");
    }
    assert_eq!(std::fs::read_to_string(&earlier).unwrap(), "earlier");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// With more concurrent changes than sidecars, each sidecar is configured before it changes again.
#[test]
fn few_sidecars_are_removed_and_added_again() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "control --sidecars 5 --services 20 --churn 50 --at-once 100 --seconds 0.5 --changes endpoint --repeat 1 \
                     --output json";
    let output = bench(folder.path(), &arguments.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(printed["churn"]["per_second"].as_f64().unwrap() > 0.0, "{printed}");
}

#[test]
fn a_short_comparison_measures_every_kind_of_load_and_can_be_shown_again() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "compare --peers skysail,relay --only pair,flat-out,http2,tcp,handshakes --rounds 1 --seconds 1 \
                     --warmup 0.3 --no-realtime --html page.html --output json";
    let output = bench(folder.path(), &arguments.split_whitespace().collect::<Vec<_>>());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("handshakes, full: without relay, because the relay speaks no TLS"), "{errors}");
    assert!(
        errors.contains("[1/12, ") && errors.contains("round 1, pair, 1,000 rps, 16 connections: skysail")
    );

    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let result = the_file(folder.path(), "skysail-bench-compare-");
    let written = std::fs::read(&result).unwrap();
    assert_eq!(printed, serde_json::from_slice::<serde_json::Value>(&written).unwrap());
    assert_eq!((&printed["benchmark"], &printed["interrupted"]), (&"compare".into(), &false.into()));
    let runs = printed["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 12);
    for run in runs {
        // On a busy machine, a second may pass without a response.
        if run["error"] == "no response arrived in the measured time" {
            continue;
        }
        assert!(run["error"].is_null(), "{run}");
        let cost = run["measurement"]["parts"]["server-proxy"]["cpu_us_per_request"].as_f64();
        assert!(run["peer"].is_null() || cost.unwrap() > 0.0, "{run}");
        if run["setting"] == "full" {
            assert_eq!(run["measurement"]["resumed"], 0, "{run}");
        }
    }
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("<svg ") && page.contains("1,000 rps, 16 connections"));

    let again = bench(folder.path(), &["compare", "--from", result.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&again.stdout);
    assert!(again.status.success() && text.contains("### flat-out") && text.contains("× relay"), "{text}");
}

#[test]
fn generation_is_measured_with_this_program_alone() {
    let folder = tempfile::tempdir().unwrap();
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benchmarks/scenarios/generation.yaml");
    for (options, error) in [
        (["--peers", "envoy"], "skysail: generation: --peers envoy: the benchmark has no peer but skysail"),
        (
            ["--skysail", "x"],
            "skysail: generation: --skysail x: the benchmark measures functions of the program",
        ),
    ] {
        let output = bench(folder.path(), &[&["run", scenario][..], &options].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.starts_with(error), "{errors}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn an_invalid_scenario_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x.yaml"), "name: x\nrate: 5\n").unwrap();
    for (scenario, error) in [
        ("x.yaml", "skysail: x.yaml:2: rate: unknown field `rate`"),
        ("y.yaml", "skysail: cannot read the scenario y.yaml"),
        ("y", "skysail: cannot read the scenario benchmarks/scenarios/y.yaml"),
    ] {
        let output = bench(folder.path(), &["run", scenario]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.starts_with(error), "{errors}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let output = bench(folder.path(), &["report", "."]);
    assert!(String::from_utf8_lossy(&output.stderr).contains(". has no result of bench run; measure with"));
}

#[test]
fn an_invalid_result_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x.json"), "{}").unwrap();
    let output = bench(folder.path(), &["compare", "--from", "x.json", "--html", "page.html"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.starts_with("skysail: x.json is not a result of bench compare"), "{errors}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
