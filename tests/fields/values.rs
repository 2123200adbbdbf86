//! Each value of fields with a list of values: normalization of paths, protocols of ports, upgrades to HTTP/2, and the
//! metrics that Telemetry selects.

use std::fmt::Write as _;

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, get, mesh_with, wait, with};

/// Returns the settings of the mesh.
fn settings(mesh: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata:\n  mesh: |\n    {mesh}\n"
    )
}

#[test]
fn paths_are_normalized_as_the_mesh_says() {
    let server = |version: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {version}, namespace: shop}}\n\
             spec: {{selector: {{version: {version}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
        )
    };
    let mesh = mesh_with(&["v1", "v2"].map(server).concat(), &["shop/by-envoy", "shop/api-v2"]).ready();
    let values = [
        ("NONE", "/a/./b/../c//d%2Fe"),
        ("BASE", "/a/c//d%2Fe"),
        ("MERGE_SLASHES", "/a/c/d%2Fe"),
        ("DEFAULT", "/a/c//d%2Fe"),
        ("DECODE_AND_MERGE_SLASHES", "/a/c/d/e"),
    ];
    for (value, path) in values {
        mesh.put("settings.yaml", &settings(&format!("pathNormalization: {{normalization: {value}}}")));
        for (client, version) in CLIENTS.iter().flat_map(|client| [(*client, "v1"), (*client, "v2")]) {
            eventually(&format!("{client} {version} {value}"), || {
                // `skysail call` resolves dots itself.
                let script = format!(
                    "exec 3<>/dev/tcp/{version}/80; printf 'GET /a/./b/../c//d%%2Fe HTTP/1.1\\r\\nhost: {version}\\r\\n\
                     connection: close\\r\\n\\r\\n' >&3; cat <&3"
                );
                let output = mesh.run(&["exec", &format!("shop/{client}"), "--", "bash", "-c", &script]);
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let is_it = text.contains(&format!("\"path\":\"{path}\"")) && text.contains(version);
                if is_it { Ok(()) } else { Err(text) }
            });
        }
    }
}

/// Protocols of ports, the version of HTTP by which each is reached, and `None` for ports on which routes of HTTP
/// have no effect.
const PROTOCOLS: [(&str, &str, Option<&str>); 16] = [
    ("http-1", "", Some("HTTP/1.1")),
    ("http2-1", "", Some("HTTP/2")),
    ("grpc-1", "", Some("HTTP/2")),
    ("grpc-web-1", "", Some("HTTP/2")),
    ("tcp-1", "", None),
    ("tls-1", "", None),
    ("https-1", "", None),
    ("mongo-1", "", None),
    ("mysql-1", "", None),
    ("redis-1", "", None),
    ("a", "kubernetes.io/h2c", Some("HTTP/2")),
    ("b", "kubernetes.io/ws", Some("HTTP/1.1")),
    ("c", "kubernetes.io/wss", None),
    ("d", "gRPC", Some("HTTP/2")),
    ("e", "https", None),
    ("f", "mysql", None),
];

#[test]
fn ports_have_the_protocol_of_their_name_or_their_declared_one() {
    let mut rules = String::new();
    for (number, (name, declared, _)) in PROTOCOLS.iter().enumerate() {
        let declared = match declared.is_empty() {
            true => String::new(),
            false => format!("appProtocol: {declared}, "),
        };
        writeln!(
            rules,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: p{number}, namespace: shop}}\n\
             spec: {{selector: {{app: api}}, ports: [{{name: {name}, {declared}port: 80, targetPort: 8080}}]}}\n\
             ---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: p{number}, namespace: shop}}\n\
             spec: {{hosts: [p{number}], http: [{{route: [{{destination: {{host: p{number}}}}}], \
             headers: {{request: {{set: {{x-routed: \"yes\"}}}}}}}}]}}"
        )
        .unwrap();
    }
    let mesh = mesh_with(&rules, &["shop/by-envoy", "shop/api-v2"]).ready();
    for client in CLIENTS {
        for (number, (name, _, version)) in PROTOCOLS.iter().enumerate() {
            let routed = ["\"x-routed\":\"yes\""];
            let url = format!("http://p{number}/{name}");
            let (has, lacks) =
                if version.is_some() { (&routed[..], &[][..]) } else { (&[][..], &routed[..]) };
            let case = crate::Case { url: &url, arguments: &[], status: 200, has, lacks };
            wait(&mesh, client, &case);
            if let Some(version) = version {
                uses(&mesh, client, &format!("p{number}"), version);
            }
        }
    }
}

#[test]
fn connections_are_upgraded_where_a_rule_does_not_prevent_it() {
    let rule = |host: &str, policy: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {host}, namespace: shop}}\n\
             spec: {{selector: {{app: api}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n\
             ---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: {host}, namespace: shop}}\n\
             spec: {{host: {host}, trafficPolicy: {{connectionPool: {{http: {{h2UpgradePolicy: {policy}}}}}}}}}\n"
        )
    };
    let rules = [rule("upgraded", "UPGRADE"), rule("kept", "DO_NOT_UPGRADE"), rule("as-mesh", "DEFAULT")];
    let policy = |value: &str| settings(&format!("h2UpgradePolicy: {value}"));
    let mesh = mesh_with(&rules.concat(), &["shop/by-envoy", "shop/api-v2"]).ready();
    for (value, as_mesh) in [("UPGRADE", "HTTP/2"), ("DO_NOT_UPGRADE", "HTTP/1.1")] {
        mesh.put("settings.yaml", &policy(value));
        for client in CLIENTS {
            for (host, version) in [("upgraded", "HTTP/2"), ("kept", "HTTP/1.1"), ("as-mesh", as_mesh)] {
                uses(&mesh, client, host, version);
            }
        }
    }
}

/// Waits until a request to a host reaches the server with this version of HTTP.
fn uses(mesh: &Mesh, client: &str, host: &str, version: &str) {
    let path = format!("/{client}/{host}/{}", version.replace('/', "-"));
    eventually(&format!("{client} reaches {host} by {version}"), || {
        let answer = mesh.call(client, &format!("http://{host}{path}"), &[]);
        let log =
            crate::log(mesh, &["api-v1", "-c", "proxy"]) + &crate::log(mesh, &["api-v2", "-c", "proxy"]);
        let line =
            log.lines().rfind(|line| line.contains(&format!(" {path} "))).unwrap_or_default().to_owned();
        if line.contains(&format!(" {path} {version}\"")) {
            Ok(())
        } else {
            Err(format!("{answer:?} {line}"))
        }
    });
}

/// Metrics: the name in Telemetry, and in Prometheus.
const METRICS: [(&str, &str); 10] = [
    ("GRPC_REQUEST_MESSAGES", "istio_request_messages_total"),
    ("GRPC_RESPONSE_MESSAGES", "istio_response_messages_total"),
    ("REQUEST_COUNT", "istio_requests_total"),
    ("REQUEST_DURATION", "istio_request_duration_milliseconds_count"),
    ("REQUEST_SIZE", "istio_request_bytes_count"),
    ("RESPONSE_SIZE", "istio_response_bytes_count"),
    ("TCP_CLOSED_CONNECTIONS", "istio_tcp_connections_closed_total"),
    ("TCP_OPENED_CONNECTIONS", "istio_tcp_connections_opened_total"),
    ("TCP_RECEIVED_BYTES", "istio_tcp_received_bytes_total"),
    ("TCP_SENT_BYTES", "istio_tcp_sent_bytes_total"),
];

/// A public Envoy has no filter for Istio's metrics.
#[test]
fn each_metric_can_be_disabled() {
    let mut rules = "apiVersion: v1\nkind: Service\nmetadata: {name: ports, namespace: shop}\n\
         spec: {selector: {app: api}, ports: [{name: tcp, port: 90, targetPort: 8080}, {name: grpc, port: 91, targetPort: 8080}]}\n"
        .to_owned();
    let metrics = METRICS.iter().map(|(metric, _)| *metric).chain(["ALL_METRICS"]);
    for (number, metric) in metrics.enumerate() {
        writeln!(
            rules,
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: c{number}, namespace: shop, labels: {{app: c{number}}}}}\n\
             spec: {{containers: [{{name: c, image: registry.example/client}}]}}\n\
             ---\napiVersion: telemetry.istio.io/v1\nkind: Telemetry\nmetadata: {{name: c{number}, namespace: shop}}\n\
             spec:\n  selector: {{matchLabels: {{app: c{number}}}}}\n  metrics:\n  - providers: [{{name: prometheus}}]\n    \
             overrides: [{{match: {{metric: {metric}, mode: CLIENT}}, disabled: true}}]"
        )
        .unwrap();
    }
    let mesh = mesh_with(&rules, &[]).ready();
    let grpc = ["--http2", "-H", "content-type: application/grpc", "-H", "te: trailers", "-d", "hello"];
    let single = METRICS.iter().map(|(metric, name)| (*metric, vec![*name]));
    let all = ("ALL_METRICS", METRICS.iter().map(|(_, name)| *name).collect());
    for (number, (metric, disabled)) in single.chain([all]).enumerate() {
        let client = format!("c{number}");
        wait(&mesh, &client, &get("http://api/", 200, &[]));
        wait(&mesh, &client, &get("http://ports:90/", 200, &[]));
        wait(&mesh, &client, &with(&grpc, "http://ports:91/shop.Any/Any", 200, &[]));
        eventually(&format!("{client} has all metrics but {metric}"), || {
            let page = mesh.call(&client, "http://127.0.0.1:15090/stats/prometheus", &[]).body;
            let missing: Vec<&str> =
                METRICS.iter().map(|(_, name)| *name).filter(|name| !page.contains(name)).collect();
            if missing == disabled { Ok(()) } else { Err(format!("missing: {missing:?}")) }
        });
    }
}
