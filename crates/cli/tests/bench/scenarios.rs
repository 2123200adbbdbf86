//! Scenarios in their tiny size take all turns, and their figures are plausible.

use std::path::Path;

use super::bench;

/// Returns true if a table of `bench diff` has this verdict on a figure.
fn has_verdict(table: &str, figure: &str, verdict: &str) -> bool {
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let has = |cells: Vec<String>| [figure, verdict].iter().all(|text| cells.iter().any(|cell| cell == text));
    table.lines().map(cells).any(has)
}

/// Returns the file of a scenario of the repository.
fn scenario(name: &str) -> String {
    format!("{}/../../benchmarks/scenarios/{name}.yaml", env!("CARGO_MANIFEST_DIR"))
}

/// Runs a scenario in its tiny size, and returns its result.
fn tiny(folder: &Path, name: &str) -> serde_json::Value {
    tiny_with(folder, name, &[])
}

/// Runs a scenario in its tiny size with further arguments, and returns its result.
fn tiny_with(folder: &Path, name: &str, further: &[&str]) -> serde_json::Value {
    let arguments = ["run", &scenario(name), "--size", "tiny", "--peers", "skysail", "--no-realtime"];
    let arguments = [&arguments[..], &["--results", "results", "--output", "json"], further].concat();
    let output = bench(folder, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_tiny_scenario_measures_all_turns_and_its_result_can_be_drawn_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "latency-connections");
    let json = folder.path().join("results/latency-connections.json");
    let written = std::fs::read(&json).unwrap();
    assert_eq!(printed, serde_json::from_slice::<serde_json::Value>(&written).unwrap());
    assert_eq!((&printed["benchmark"], &printed["size"]), (&"scenario".into(), &"tiny".into()));
    assert_eq!(printed["violations"], serde_json::json!([]));

    // Baseline, the client's sidecar, the server's and both, with 2 and 4 connections.
    let runs = printed["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 8);
    for run in runs {
        let counts = ["requests", "unanswered", "refused"].map(|name| run[name].as_u64().unwrap());
        assert_eq!(counts, [100, 0, 0], "{run}");
        let latency =
            ["p50", "p90", "p99", "p99_9", "max"].map(|name| run["latency_us"][name].as_f64().unwrap());
        assert!(latency[0] > 0.0 && latency.is_sorted(), "{run}");
        assert!(run["generator_late_p99_us"].as_f64().unwrap() >= 0.0, "{run}");
        let sidecars = match run["topology"].as_str().unwrap() {
            "baseline" => &[][..],
            "client-sidecar" => &["client-proxy"],
            "server-sidecar" => &["server-proxy"],
            _ => &["client-proxy", "server-proxy"],
        };
        for sidecar in sidecars {
            assert!(run["parts"][sidecar]["cpu_us_per_request"].as_f64().unwrap() > 0.0, "{run}");
            assert!(run["parts"][sidecar]["rss_kb"].as_u64().unwrap() > 0, "{run}");
        }
    }
    let csv = std::fs::read_to_string(json.with_extension("csv")).unwrap();
    assert!(
        csv.starts_with("StartTime,ActualDuration,Labels,NumThreads,ActualQPS,p50,p90,p99,p999,"),
        "{csv}"
    );
    assert_eq!(csv.lines().count(), 9, "{csv}");

    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("<svg ") && page.contains("too short for reliable figures"), "{page}");

    let result = json.to_str().unwrap();
    let compared = bench(folder.path(), &["diff", result, result]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && text.contains(" same |") && !text.contains(" worse |"), "{text}");
    let mut worse = printed;
    for run in worse["runs"].as_array_mut().unwrap() {
        let cpu = &mut run["parts"]["server-proxy"]["cpu_us_per_request"];
        *cpu = (cpu.as_f64().unwrap_or_default() * 2.0).into();
    }
    std::fs::write(folder.path().join("worse.json"), worse.to_string()).unwrap();
    // One round with two numbers of connections permits a confidence of 50 %, and no verdict unless that is accepted.
    let compared = bench(folder.path(), &["diff", result, "worse.json", "--confidence", "50"]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && text.contains("| too few rounds |"), "{text}");
    let options = ["diff", result, "worse.json", "--confidence", "50", "--min-rounds", "1"];
    let compared = bench(folder.path(), &options);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert_eq!(compared.status.code(), Some(1), "{text}");
    assert!(has_verdict(&text, "server-proxy CPU µs", "worse"), "{text}");
    for run in worse["runs"].as_array_mut().unwrap() {
        if run["topology"] == "both-sidecars" {
            *run = serde_json::json!({
                "round": run["round"], "topology": run["topology"], "peer": run["peer"],
                "connections": run["connections"], "error": "the server ended",
            });
        }
    }
    std::fs::write(folder.path().join("lacking.json"), worse.to_string()).unwrap();
    let compared = bench(folder.path(), &["diff", result, "lacking.json"]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert_eq!(compared.status.code(), Some(1), "{text}");
    assert!(has_verdict(&text, "server-proxy CPU µs", "only in A"), "{text}");
}

#[test]
fn a_tiny_scenario_of_an_ingress_gateway_accounts_for_it_apart() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "latency-ingress");
    assert_eq!(printed["violations"], serde_json::json!([]));
    let runs = printed["runs"].as_array().unwrap();
    let topologies: Vec<&str> = runs.iter().map(|run| run["topology"].as_str().unwrap()).collect();
    assert_eq!(topologies, ["baseline", "ingress"]);
    for run in runs {
        let counts = ["requests", "unanswered", "refused"].map(|name| run[name].as_u64().unwrap());
        assert_eq!(counts, [100, 0, 0], "{run}");
        for part in ["gateway-proxy", "server-proxy"] {
            let cpu = run["parts"][part]["cpu_us_per_request"].as_f64().unwrap_or_default();
            assert_eq!(cpu > 0.0, run["topology"] == "ingress", "{run}");
        }
        assert!(run["parts"]["client-proxy"].is_null(), "{run}");
    }
    // Columns of CPU and memory: the client's sidecar, the server's, and the gateway.
    let csv = std::fs::read_to_string(folder.path().join("results/latency-ingress.csv")).unwrap();
    let line = csv.lines().last().unwrap();
    assert!(line.contains("_1024_skysail_ingress,"), "{csv}");
    let cells: Vec<f64> = line.rsplit(',').take(6).map(|cell| cell.parse().unwrap()).collect();
    let is_used: Vec<bool> = cells.iter().rev().map(|cell| *cell > 0.0).collect();
    assert_eq!(is_used, [false, true, true, false, true, true], "{csv}");
}

#[test]
fn a_tiny_scenario_of_variants_measures_each_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "latency-variants");
    assert_eq!(printed["violations"], serde_json::json!([]));
    let runs = printed["runs"].as_array().unwrap();
    let variants: Vec<&str> = runs.iter().map(|run| run["variant"].as_str().unwrap_or("usual")).collect();
    let policies = ["policies-address", "policies-path", "policies-jwt", "external-authorization"];
    let expected = [&["usual", "usual", "no-telemetry", "metrics", "access-log"][..], &policies].concat();
    assert_eq!(variants, expected, "the first one is the baseline");
    for (run, variant) in runs.iter().zip(variants) {
        // A policy that refuses a request, or a token that is not verified, would give another status.
        let counts = ["requests", "unanswered", "refused"].map(|name| run[name].as_u64().unwrap());
        assert_eq!(counts, [100, 0, 0], "{run}");
        let cpu = |part: &str| run["parts"][part]["cpu_us_per_request"].as_f64().unwrap_or_default();
        assert_eq!(cpu("server-proxy") > 0.0, run["topology"] != "baseline", "{run}");
        assert_eq!(cpu("authorizer") > 0.0, variant == "external-authorization", "{run}");
        let entries = run["log_entries"]["server-proxy"].as_u64();
        assert_eq!(entries.is_some_and(|entries| entries >= 100), variant == "access-log", "{run}");
    }
    for row in printed["summary"].as_array().unwrap() {
        assert_eq!(row["metrics"]["cpu_variant_us_per_request"].is_null(), row["variant"].is_null(), "{row}");
    }
    let csv = std::fs::read_to_string(folder.path().join("results/latency-variants.csv")).unwrap();
    assert!(csv.contains("_1024_skysail-policies-jwt_both,"), "{csv}");
    let result = "results/latency-variants.json";
    let compared = bench(folder.path(), &["diff", result, result]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && text.contains("skysail, external-authorization"), "{text}");
}

#[test]
fn flame_graphs_of_the_sidecars_are_drawn_where_perf_is_permitted() {
    let folder = tempfile::tempdir().unwrap();
    let of_another =
        bench(folder.path(), &["run", &scenario("generation"), "--size", "tiny", "--perf", "perf"]);
    let errors = String::from_utf8_lossy(&of_another.stderr);
    assert!(
        !of_another.status.success() && errors.contains("--perf: no scenario is one of traffic"),
        "{errors}"
    );

    let probe = ["record", "--event", "cpu-clock", "--output", "probe.data", "--", "true"];
    let probe = std::process::Command::new("perf").args(probe).current_dir(folder.path()).output();
    if probe.is_ok_and(|output| output.status.success()) {
        tiny_with(folder.path(), "latency-ingress", &["--perf", "perf"]);
        let file = "results/latency-ingress.json";
        let compared = bench(folder.path(), &["diff", file, file]);
        let errors = String::from_utf8_lossy(&compared.stderr);
        assert!(!compared.status.success() && errors.contains("was measured with --perf"), "{errors}");
        for sidecar in ["gateway-proxy", "server-proxy"] {
            let name = format!("perf/latency-ingress-ingress-skysail-2-{sidecar}.svg");
            let svg = std::fs::read_to_string(folder.path().join(name)).unwrap();
            let is_whole = svg.starts_with("<svg ") && svg.ends_with("</svg>\n");
            assert!(is_whole && !svg.contains("<script") && !svg.contains("href="), "{sidecar}");
            // At least one thread of the sidecar has samples.
            for text in ["<title>worker-", " samples, ", &format!("-2: {sidecar}</text>")] {
                assert!(svg.contains(text), "{sidecar}: {text}");
            }
        }
    } else {
        let arguments = ["run", &scenario("latency-ingress"), "--size", "tiny", "--perf", "perf"];
        let refused = bench(folder.path(), &[&arguments[..], &["--peers", "skysail"]].concat());
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && errors.contains("or leave --perf out"), "{errors}");
    }
}

#[test]
fn a_size_that_a_scenario_lacks_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let output =
        bench(folder.path(), &["run", &scenario("policies"), "--size", "huge", "--peers", "skysail"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    let expected = "policies: --size huge: the scenario has no such size; use default, tiny, full";
    assert!(!output.status.success() && errors.contains(expected), "{errors}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_tiny_scenario_of_access_logs_counts_every_entry_and_the_cost_of_collectors() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "access-logs");
    assert_eq!(printed["violations"], serde_json::json!([]));
    let runs = printed["runs"].as_array().unwrap();
    let logs: Vec<&str> = runs.iter().map(|run| run["access_log"].as_str().unwrap_or("none")).collect();
    assert_eq!(logs, ["none", "none", "file", "stdout", "otlp"], "the baseline has none");
    for (run, log) in runs.iter().zip(logs) {
        let counts = ["requests", "unanswered", "refused"].map(|name| run[name].as_u64().unwrap());
        assert_eq!(counts, [200, 0, 0], "{run}");
        let cpu = |part: &str| run["parts"][part]["cpu_us_per_request"].as_f64().unwrap_or_default();
        for side in ["client", "server"] {
            let sidecar = format!("{side}-proxy");
            assert_eq!(cpu(&sidecar) > 0.0, run["topology"] != "baseline", "{run}");
            // 0.3 seconds of warm-up and 1 second of measurement; up to one more request is due at each boundary.
            let entries = run["log_entries"][&sidecar].as_u64();
            assert_eq!(entries.is_some(), log != "none", "{run}");
            assert!(entries.is_none_or(|entries| (200..=262).contains(&entries)), "{run}");
            let has_collector = matches!(log, "stdout" | "otlp");
            assert_eq!(cpu(&format!("{side}-collector")) > 0.0, has_collector, "{run}");
        }
    }
    let summary = printed["summary"].as_array().unwrap();
    for row in summary {
        let has = |metric: &str| !row["metrics"][metric].is_null();
        assert_eq!(has("cpu_access_log_us_per_request"), !row["access_log"].is_null(), "{row}");
        assert_eq!(has("cpu_collectors_us_per_request"), has("cpu_client_collector_us_per_request"), "{row}");
    }
    let csv = std::fs::read_to_string(folder.path().join("results/access-logs.csv")).unwrap();
    assert!(csv.contains("_1024_skysail-otlp_both,"), "{csv}");

    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("<rect class=\"published1 published\""), "{page}");
    assert!(page.contains(">Istio 0.8, stdout [2]<"), "{page}");
}

#[test]
fn a_tiny_scenario_of_a_control_plane_runs_its_benchmark() {
    let folder = tempfile::tempdir().unwrap();
    let capacity = tiny(folder.path(), "capacity");
    let runs = capacity["runs"].as_array().unwrap();
    assert_eq!((runs.len(), &capacity["violations"]), (2, &serde_json::json!([])));
    for (run, is_search) in runs.iter().zip([false, true]) {
        assert!(run["error"].is_null(), "{run}");
        let sidecars = run["sidecars"].as_f64();
        assert_eq!(run["figures"]["most_sidecars"].as_f64(), sidecars.filter(|_| is_search), "{run}");
        // The search tries 20 sidecars, and then its maximum. On a busy machine that may be beyond a limit.
        let trials = run["searched"].as_array().map_or(0, Vec::len);
        assert!(if is_search { trials >= 2 } else { trials == 0 && sidecars == Some(20.0) }, "{run}");
        let of = |name: &str| run["figures"][name].as_f64().unwrap_or_else(|| panic!("{name}: {run}"));
        assert!(of("idle_mb") > 1.0 && of("resident_mb") <= of("peak_mb"), "{run}");
        for figure in ["connect_seconds", "connect_cpu_ms", "endpoint_last_ms", "churn_interval_ms"] {
            assert!(of(figure) > 0.0, "{run}");
        }
    }
    let perf = std::fs::read(folder.path().join("results/capacity.perfdata.json")).unwrap();
    let perf: serde_json::Value = serde_json::from_slice(&perf).unwrap();
    assert_eq!((&perf["version"], &perf["labels"]["scenario"]), (&"v1".into(), &"capacity".into()));
    let items = perf["dataItems"].as_array().unwrap();
    let is_most = |item: &&serde_json::Value| item["labels"]["Metric"] == "most_sidecars";
    let most = items.iter().find(is_most).unwrap();
    assert_eq!(most["labels"]["Case"], "services-1000-most");
    assert!(most["data"]["Perc50"].as_f64() >= Some(20.0), "{most}");
    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("churn-50: skysail bench control --sidecars 20"), "{page}");
    assert!(page.contains("istiod 1.19, churn 50 %"), "{page}");
}

#[test]
fn dns_queries_depend_on_hosts_and_not_on_sidecars() {
    let folder = tempfile::tempdir().unwrap();
    let dns = tiny(folder.path(), "dns-load");
    assert_eq!(dns["violations"], serde_json::json!([]));
    assert!(dns["peers"]["skysail"]["version"].is_string() && dns["peers"]["envoy"].is_null(), "{dns}");
    let runs = dns["runs"].as_array().unwrap();
    let cases: Vec<&str> = runs.iter().map(|run| run["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["sidecars-100-hosts-30", "sidecars-500-hosts-30", "round-robin", "static"]);
    for (run, sidecars) in runs.iter().zip([100, 500, 100, 100]) {
        assert_eq!((run["error"].is_null(), run["sidecars"].as_u64()), (true, Some(sidecars)), "{run}");
        // Three names with a TTL of 1 s are asked for a few times in 2.5 s, not once for each of 100 sidecars.
        let queries = run["figures"]["queries_skysail_per_second"].as_f64().unwrap() * 2.5;
        let range = if run["case"] == "static" { 0.0..=0.0 } else { 1.0..=60.0 };
        assert!(range.contains(&queries), "{queries} queries: {run}");
    }
}

#[test]
fn a_tiny_scenario_of_a_mesh_measures_it_with_and_without_sidecars() {
    let folder = tempfile::tempdir().unwrap();
    for (scenario, pods) in [("mesh-wide", 4), ("policies", 12)] {
        let printed = tiny(folder.path(), scenario);
        assert_eq!(printed["violations"], serde_json::json!([]), "{scenario}");
        let runs = printed["runs"].as_array().unwrap();
        let cases = printed["settings"]["cases"].as_array().unwrap();
        assert!(runs.len() >= 2 && runs.len() == cases.len(), "{runs:?}");
        for (run, case) in runs.iter().zip(cases) {
            let number = |name: &str| run[name].as_u64().unwrap();
            let phases = case["mesh"]["phases"].as_array().map(Vec::as_slice).unwrap_or_default();
            let phase = phases.iter().find(|phase| phase["name"] == case["phase"]);
            let percent = phase.map_or(100.0, |phase| phase["rate_percent"].as_f64().unwrap());
            let rate = case["mesh"]["rate"].as_f64().unwrap() * percent / 100.0;
            assert_eq!((number("pods"), number("failed")), (pods, 0), "{run}");
            assert!((rate * 0.5..=rate * 2.0).contains(&run["requests"].as_f64().unwrap()), "{run}");
            assert!(run["requests_in_mesh"].as_f64() > run["requests"].as_f64(), "{run}");
            let latency =
                ["p50", "p90", "p99", "p99_9"].map(|name| run["latency_us"][name].as_f64().unwrap());
            assert!(latency[0] > 0.0 && latency.is_sorted(), "{run}");
            let has_sidecars = case["peer"] == "skysail";
            assert_eq!(number("sidecars"), if has_sidecars { pods } else { 0 }, "{run}");
            for part in ["services", "sidecars", "control"] {
                let cpu = run["parts"][part]["cpu_us_per_second"].as_f64();
                let is_expected = part == "services" || has_sidecars;
                // The control plane may have nothing to do.
                let least = if part == "control" { 0.0 } else { 1.0 };
                assert_eq!(cpu.is_some_and(|cpu| cpu >= least), is_expected, "{part}: {run}");
            }
        }
        for row in printed["summary"].as_array().unwrap() {
            let of_telemetry = &row["metrics"]["cpu_telemetry_us_per_request"];
            assert_eq!(of_telemetry.is_null(), row["case"] != "tree/skysail", "{row}");
        }
    }
    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(
        page.contains("Permissive and restricted policy") && page.contains("restricted/skysail/rate-3"),
        "{page}"
    );
    let result = "results/mesh-wide.json";
    let compared = bench(folder.path(), &["diff", result, result]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && text.contains("| tree/skysail "), "{text}");
    assert!(!text.contains("tree/none"), "{text}");
}

#[test]
fn a_tiny_scenario_of_tiers_has_phases_in_which_workers_change() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "tiers");
    assert_eq!(printed["violations"], serde_json::json!([]));
    let runs = printed["runs"].as_array().unwrap();
    let phases = ["before", "server-dies", "returned", "degraded", "outage", "double-rate"];
    let of = |peer: &str| phases.map(|phase| format!("three-tiers/{peer}/{phase}"));
    let names: Vec<&str> = runs.iter().map(|run| run["case"].as_str().unwrap()).collect();
    let expected = [of("none"), of("skysail")].concat();
    assert_eq!(names[..12], expected);
    assert_eq!(names[12..], ["many-workers/none", "many-workers/skysail"]);
    for (run, name) in runs.iter().zip(&names) {
        let number = |name: &str| run[name].as_u64().unwrap();
        let errors = run["errors"].as_object().unwrap();
        assert_eq!(
            errors.values().map(|count| count.as_u64().unwrap()).sum::<u64>(),
            number("failed"),
            "{run}"
        );
        // One second at 20 requests/s; double-rate at 40.
        let rate = if name.ends_with("double-rate") { 40 } else { 20 };
        assert!((rate / 2..=rate * 2).contains(&number("requests")), "{run}");
        let latency = ["p50", "p90", "p99", "p99_9"].map(|name| run["latency_us"][name].as_f64().unwrap());
        assert!(latency[0] > 0.0 && latency.is_sorted(), "{run}");
        let has_sidecars = name.contains("/skysail");
        assert_eq!(number("sidecars"), if has_sidecars { 7 } else { 0 }, "{run}");
        for part in ["sidecars", "control"] {
            assert_eq!(run["parts"][part]["cpu_us_per_second"].is_number(), has_sidecars, "{run}");
        }
        // The entry point refuses connections: the client sees it, or its sidecar answers.
        if name.ends_with("/outage") {
            let cause = if has_sidecars { "503" } else { "connect" };
            assert!(errors.get(cause).is_some_and(|count| count.as_u64() > Some(0)), "{run}");
        }
    }
    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(
        page.contains("three-tiers/skysail/outage") && page.contains("Not available: linkerd2-proxy"),
        "{page}"
    );
}

#[test]
fn tiny_scenarios_of_grpc_and_tcp_measure_all_topologies() {
    let folder = tempfile::tempdir().unwrap();
    for (scenario, protocol, title) in
        [("latency-grpc", "grpc", "gRPC (unary)"), ("latency-tcp", "tcp", "TCP (echo)")]
    {
        let printed = tiny(folder.path(), scenario);
        assert_eq!(printed["violations"], serde_json::json!([]));
        assert_eq!(printed["settings"]["protocol"], protocol);
        let runs = printed["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 4, "baseline, the client's sidecar, the server's and both");
        for run in runs {
            let number = |name: &str| run[name].as_u64().unwrap();
            // Half a second of 200 requests/s; up to one more is due at each boundary.
            assert!((99..=101).contains(&number("requests")), "{run}");
            assert_eq!((number("unanswered"), number("refused")), (0, 0), "{run}");
            let latency =
                ["p50", "p90", "p99", "p99_9"].map(|name| run["latency_us"][name].as_f64().unwrap());
            assert!(latency[0] > 0.0 && latency.is_sorted(), "{run}");
            for side in ["client", "server"] {
                let cpu = &run["parts"][format!("{side}-proxy")]["cpu_us_per_request"];
                let topology = run["topology"].as_str().unwrap();
                let has_sidecar = topology.starts_with(side) || topology == "both-sidecars";
                assert_eq!(cpu.as_f64().unwrap_or_default() > 0.0, has_sidecar, "{run}");
            }
        }
        let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
        assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
        let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
        assert!(page.contains(&format!("200 requests/s over {title}")), "{page}");
    }
}

#[test]
fn a_tiny_scenario_of_the_airline_measures_its_variants() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "airline");
    assert_eq!(printed["violations"], serde_json::json!([]));
    let runs = printed["runs"].as_array().unwrap();
    let cases: Vec<&str> = runs.iter().map(|run| run["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["none", "ingress-only/skysail", "no-policy/skysail", "full/skysail"]);
    for (run, sidecars) in runs.iter().zip([0, 1, 7, 7]) {
        assert_eq!(run["sidecars"].as_u64(), Some(sidecars), "{run}");
        for trial in ["at_rate", "of_users", "within_limit"].map(|name| &run[name]) {
            let number = |name: &str| trial[name].as_u64().unwrap();
            assert_eq!(number("failed"), 0, "{run}");
            let by_name = trial["by_name"].as_object().unwrap();
            assert_eq!(
                by_name.values().map(|of| of.as_u64().unwrap()).sum::<u64>(),
                number("calls"),
                "{run}"
            );
            // Most calls of the mix are searches.
            assert!(by_name["queryflights"].as_u64() > Some(number("calls") / 3), "{run}");
            let latency = ["p50", "p90", "p99"].map(|name| trial["latency_us"][name].as_f64().unwrap());
            assert!(latency[0] > 0.0 && latency.is_sorted(), "{run}");
        }
        let searched = run["searched"].as_array().unwrap();
        assert!(searched.iter().any(|of| of[1] == true), "{run}");
        for part in ["services", "sidecars", "control"] {
            let cost = &run["parts"][part];
            assert_eq!(
                cost["rss_kb"].as_u64() > Some(0),
                part == "services" || sidecars > 0,
                "{part}: {run}"
            );
        }
    }
    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("Istio 1.2.3, full") && page.contains("relative to ingress-only"), "{page}");
}

#[test]
fn a_tiny_scenario_of_networks_measures_those_of_the_kernel_and_names_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "networks");
    assert_eq!(printed["violations"], serde_json::json!([]));
    let runs = printed["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 14, "seven networks without sidecars and with those of skysail");
    for run in runs {
        let (network, peer) = run["case"].as_str().unwrap().split_once('/').unwrap();
        assert!(run["error"].is_null(), "{run}");
        if let Some(reason) = run["unavailable"].as_str() {
            assert!(matches!(network, "ipvlan" | "wireguard" | "far"), "{run}");
            assert!(reason.starts_with(&format!("network {network}: the ")), "{run}");
            continue;
        }
        let counts = ["requests", "unanswered", "refused"].map(|name| run[name].as_u64().unwrap());
        assert_eq!(counts, [100, 0, 0], "{run}");
        let latency = ["p50", "p90", "p99", "p99_9"].map(|name| run["latency_us"][name].as_f64().unwrap());
        assert!(latency[0] > 0.0 && latency.is_sorted(), "{run}");
        assert!(network != "far" || latency[0] >= 2_000.0, "1 ms in each direction: {run}");
        for part in ["client-proxy", "server-proxy"] {
            let cpu = run["parts"][part]["cpu_us_per_request"].as_f64().unwrap_or_default();
            assert_eq!(cpu > 0.0, peer.starts_with("skysail"), "{run}");
        }
    }
    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(
        page.contains(">vxlan</text>")
            && page.contains(">skysail</text>")
            && page.contains("Istio add-on of AKS"),
        "{page}"
    );
    let result = "results/networks.json";
    let compared = bench(folder.path(), &["diff", result, result]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && text.contains("| bridge/skysail/4 "), "{text}");
}

#[test]
fn a_tiny_scenario_of_generation_measures_all_inputs_in_process() {
    let folder = tempfile::tempdir().unwrap();
    let printed = tiny(folder.path(), "generation");
    assert_eq!((&printed["benchmark"], &printed["size"]), (&"scenario".into(), &"tiny".into()));
    assert_eq!(printed["violations"], serde_json::json!([]));
    assert_eq!(printed["peers"].as_object().unwrap().keys().collect::<Vec<_>>(), ["skysail"]);
    let runs = printed["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 22);
    for run in runs {
        assert!(run["error"].is_null() && run["repetitions"] == 1, "{run}");
        assert!(run["objects"].as_u64() >= Some(2) && run["input_bytes"].as_u64() > Some(500), "{run}");
        let phases = run["phases"].as_object().unwrap();
        assert_eq!(phases.len(), 6, "{run}");
        for cost in phases.values() {
            assert!(["cpu_us", "time_us"].iter().all(|time| cost[time].as_f64() > Some(0.0)), "{run}");
        }
        for kind in ["cds", "lds", "nds"] {
            assert!(run["resources"][kind]["number"].as_u64() >= Some(1), "{run}");
        }
    }
    let number = |input: &str, kind: &str| {
        let run = runs.iter().find(|run| run["case"] == input).unwrap();
        run["resources"][kind]["number"].as_u64().unwrap()
    };
    // Three services: a secret, an HTTPS server, or an endpoint for each of four ports of each, and the own service.
    assert_eq!((number("secrets-10", "sds"), number("gateways", "rds")), (3, 4));
    assert_eq!((number("empty", "eds"), number("virtualservice", "eds")), (16, 4));
    for row in printed["summary"].as_array().unwrap() {
        let spread =
            |metric: &str| ["min", "median", "max"].map(|of| row["metrics"][metric][of].as_f64().unwrap());
        let median = |metric: &str| spread(metric)[1];
        assert!(
            spread("compile_cpu_us").is_sorted() && median("compile_cpu_us") > median("own_cpu_us"),
            "{row}"
        );
        assert!(median("bytes") > median("cds_bytes") && median("cds_bytes") > 0.0, "{row}");
    }
    let results = std::fs::read_dir(folder.path().join("results")).unwrap();
    assert_eq!(results.count(), 1, "there is no CSV file");

    let drawn = bench(folder.path(), &["report", "results", "--html", "page.html"]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("<svg ") && page.contains("too short for reliable figures"), "{page}");
    let drawn = bench(folder.path(), &["report", "results", "--istio-csv", "benchmark.csv"]);
    let errors = String::from_utf8_lossy(&drawn.stderr);
    assert!(errors.contains("--istio-csv: no result is one of traffic"), "{errors}");

    let result = "results/generation.json";
    let compared = bench(folder.path(), &["diff", result, result]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success() && text.contains(" same |") && !text.contains(" worse |"), "{text}");
    let mut larger = printed;
    for run in larger["runs"].as_array_mut().unwrap() {
        run["resources"]["cds"]["bytes"] = 1_000_000.into();
    }
    std::fs::write(folder.path().join("larger.json"), larger.to_string()).unwrap();
    let compared = bench(folder.path(), &["diff", result, "larger.json"]);
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(text.contains("Some figures have too few rounds for a confidence of 99 %"), "{text}");
    let refused = bench(folder.path(), &["diff", result, result, "--relative-to", "envoy"]);
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && errors.contains("are compared case by case"), "{errors}");
}
