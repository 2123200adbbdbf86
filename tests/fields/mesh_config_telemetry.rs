//! MeshConfig: providers of telemetry, whose collector records what the proxies send.

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, check, get, mesh_config_collector::Collector, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("mesh_config_telemetry.yaml");
/// Clients and servers; the sidecars of a pair are of one kind.
const PAIRS: [(&str, &str); 2] = [("by-skysail", "ours"), ("by-envoy", "theirs")];
const ALS: &str = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs";
/// Filter state that a real Envoy has of calls of gRPC.
const STATE: &str = "envoy.filters.http.grpc_stats";

#[test]
fn providers_receive_logs_and_metrics() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    let collector = Collector::start(&mesh, "collector");
    for (client, server) in PAIRS {
        let url = format!("http://{server}/logged/{client}");
        let request = || wait(&mesh, client, &with(&["-H", "x-asked: own-asked"], &url, 200, &[]));
        let path = format!("/logged/{client}");
        let texts = [ALS, &path, "x-asked", "own-asked", "content-type", "application/json"];
        collector.wait_after("a log of requests", &texts, request);
        let texts = ["LogsService/Export", &format!("own {path}"), "own-label", "code 200"];
        collector.wait_after("a log of OpenTelemetry", &texts, request);
        // The first message of a stream has the name of the log and that of the proxy.
        for name in ["own-http", "own-tcp"] {
            collector.wait("a stream of logs", &[ALS, name, &format!("~{client}-")]);
        }
        calls(&mesh, &collector, client);
        wait_logged(&mesh, &[client, "-c", "proxy"], &[&format!("\"where\":\"{path}\"")]);
        // Proxies do not send what these fields set.
        let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
        assert!(dump.contains("\"own-otel\"") && dump.contains("\"own.state\""), "{client}: {dump}");
    }
    metrics(&mesh);
    for client in CLIENTS {
        let info = mesh.call(client, "http://127.0.0.1:15000/server_info", &[]).json();
        assert_eq!(info["node"]["metadata"]["MESH_ID"], "own-mesh", "{client}");
    }
    for (is_omitted, value) in [(true, "<>"), (false, "<->")] {
        for client in CLIENTS {
            eventually(&format!("missing values are {value}"), || {
                wait(&mesh, client, &get(&format!("http://theirs/{is_omitted}"), 200, &[]));
                let log = crate::log(&mesh, &[client, "-c", "proxy"]);
                if log.contains(&format!("text /{is_omitted} missing={value}")) { Ok(()) } else { Err(log) }
            });
        }
        if is_omitted {
            mesh.edit("rules.yaml", "omitEmptyValues: true", "omitEmptyValues: false");
        }
    }
}

/// Logs have the trailers of responses, and the filter state that an Envoy has.
fn calls(mesh: &Mesh, collector: &Collector, client: &str) {
    let arguments = ["--http2", "-X", "POST", "-H", "content-type: application/grpc"];
    let path = format!("/own.Service/{client}");
    let request = || wait(mesh, client, &with(&arguments, &format!("http://calls{path}"), 200, &[]));
    collector.wait_after("a log of calls", &[ALS, &path], request);
    if client == "by-envoy" {
        collector.wait_after("trailers", &[ALS, &path, "grpc-status"], request);
        collector.wait_after("state in a log of requests", &[ALS, "own-http", &path, STATE], request);
        collector.wait_after("state in a log of connections", &[ALS, "own-tcp", STATE], request);
    }
}

fn metrics(mesh: &Mesh) {
    let client = "by-skysail";
    let count = || -> u64 {
        let page = mesh.call(client, "http://127.0.0.1:15090/stats/prometheus", &[]).body;
        let lines = page.lines().filter(|line| line.starts_with("istio_requests_total{"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    };
    let counted = || {
        let before = count();
        (0..5).for_each(|_| check(mesh, &[client], &[get("http://ours/", 200, &[])]));
        count().saturating_sub(before)
    };
    eventually("requests are counted", || if counted() > 0 { Ok(()) } else { Err(String::new()) });
    mesh.edit("rules.yaml", "metrics: [own-metrics]", "metrics: []");
    eventually("no request is counted", || match counted() {
        0 => Ok(()),
        count => Err(format!("{count}")),
    });
    mesh.edit("rules.yaml", "metrics: []", "metrics: [own-metrics]");
    eventually("requests are counted again", || if counted() > 0 { Ok(()) } else { Err(String::new()) });
}

#[test]
fn tracers_receive_spans() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    let collector = Collector::start(&mesh, "collector");
    zipkin(&mesh, &collector);
    let over = [
        ("otlp-http", "/own/traces", "headers: [{name: x-own, value: otlp-http}"),
        ("otlp-grpc", "TraceService/Export", "initialMetadata: [{name: x-own, value: otlp-grpc}"),
    ];
    let mut before = "zipkin".to_owned();
    for (provider, path, header) in over {
        mesh.edit("rules.yaml", &format!("tracing: [{before}]"), &format!("tracing: [{provider}]"));
        before = provider.to_owned();
        for (client, server) in PAIRS {
            let mut texts = vec![path, "\"x-own\": \"", provider, "istio.mesh_id", "own-mesh"];
            let own = format!("/{provider}/{client}");
            let short = own.get(..20).unwrap_or(&own).to_owned();
            texts.push(&short);
            let url = format!("http://{server}{own}/long-path-to-its-END");
            let line = collector.wait_after("spans", &texts, || wait(&mesh, client, &get(&url, 200, &[])));
            assert_eq!(line.contains("END"), provider == "otlp-grpc", "{line}");
            // The environment of the proxies has no attributes.
            let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
            let detects = dump.contains("EnvironmentResourceDetectorConfig");
            assert!(detects || provider == "otlp-grpc", "{client}: {dump}");
        }
        gives_up(&mesh, &collector, header, path);
    }
    untraced(&mesh, &before);
}

fn zipkin(mesh: &Mesh, collector: &Collector) {
    for (client, server) in PAIRS {
        let url = format!("http://{server}/zipkin/{client}/long-path-to-its-END");
        let request = || wait(mesh, client, &get(&url, 200, &["\"traceparent\":", "\"x-b3-traceid\":"]));
        let short = &format!("/zipkin/{client}/long-path-to-its-END")[..20];
        let texts = ["/own/spans", "\"x-own\": \"zipkin\"", "\"x-unset\": \"\"", "own-mesh", short];
        let line = collector.wait_after("spans", &texts, request);
        assert!(!line.contains("END"), "{line}");
        let id = line.split("\\\"traceId\\\":\\\"").nth(1).and_then(|rest| rest.split('\\').next());
        assert_eq!(id.map(str::len), Some(16), "{line}");
    }
    gives_up(mesh, collector, "headers: [{name: x-own, value: zipkin}", "/own/spans");
}

/// The collector does not answer reports with a further header, and each proxy gives them up. An Envoy has timeouts of
/// its own, except for OpenTelemetry over HTTP.
fn gives_up(mesh: &Mesh, collector: &Collector, header: &str, path: &str) {
    mesh.edit("rules.yaml", header, &format!("{header}, {{name: x-slow, value: slow}}"));
    let pairs = PAIRS.iter().filter(|(client, _)| *client == "by-skysail" || path == "/own/traces");
    for (client, server) in pairs {
        let request = || wait(mesh, client, &get(&format!("http://{server}/"), 200, &[]));
        let texts = ["given up", &format!("{path}/slow"), &format!("~{client}-")];
        let line = collector.wait_after("a report is given up", &texts, request);
        let is_soon = ["after 0s", "after 1s", "after 2s"].iter().any(|end| line.ends_with(end));
        assert!(is_soon, "{line}");
    }
}

/// Without a provider, the mesh configuration decides whether requests are traced, as their id shows.
fn untraced(mesh: &Mesh, provider: &str) {
    mesh.edit("rules.yaml", &format!("tracing: [{provider}]"), "tracing: []");
    mesh.edit("rules.yaml", "tracing: [{randomSamplingPercentage: 100}]", "{}");
    for (is_traced, reason) in [(true, 'b'), (false, '4')] {
        for (client, server) in PAIRS {
            eventually(&format!("{client} traces: {is_traced}"), || {
                let answer =
                    mesh.call(client, &format!("http://{server}/"), &["-H", "x-client-trace-id: own"]);
                let id = answer.json()["headers"]["x-request-id"].as_str().unwrap_or_default().to_owned();
                if id.chars().nth(14) == Some(reason) { Ok(()) } else { Err(id) }
            });
        }
        if is_traced {
            mesh.edit("rules.yaml", "enableTracing: true", "enableTracing: false");
        }
    }
}
