//! The program with a bootstrap file: changes by its admin page, and watched files.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/mesh.rs"]
mod mesh;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{fs, net::SocketAddr, path::Path, process::Command, sync::Arc, time::Duration};

use program::Program;
use skysail_identity::{Authority, KeyAndCsr, TlsSpec};
use support::{Client, within};
use tokio::net::TcpStream;

#[tokio::test]
async fn log_levels_change_at_run_time() {
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), "node: {id: a}\n").await;
    assert!(program.page("GET", "/logging?level=off").await.starts_with("HTTP/1.1 405 "));
    let shown = program.page("POST", "/logging").await;
    assert!(shown.ends_with("active loggers:\n  default: info\n"), "{shown}");
    let answer = program.page("POST", "/logging?level=error").await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\n  default: error\n"), "{answer}");
    let refused = program.page("POST", "/logging?level=loud").await;
    assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");
    assert!(refused.contains("error: \"loud\" is not a level") && refused.contains("usage: "), "{refused}");
    let log = program.quit().await;
    assert!(!log.contains("draining"), "{log}");

    let program = Program::start(folder.path(), "node: {id: a}\n").await;
    program.page("POST", "/logging?level=off").await;
    let answer = program.page("POST", "/logging?paths=skysail_proxy::app:info,skysail_xds:debug").await;
    assert!(answer.contains("\n  skysail_proxy::app: info\n"), "{answer}");
    let log = program.quit().await;
    assert!(log.contains("quit requested, draining"), "{log}");
}

#[test]
fn the_init_container_of_a_pod_runs_a_command_of_the_program() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_skysail-proxy")).args(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    // The arguments of `skysail inject`.
    let arguments =
        "intercept -p 15001 -z 15006 -u 1337 -m REDIRECT -i * -x  -b * -d 15090,15021,15020 -o 25 --dry-run";
    let (code, rules, errors) = run(&arguments.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{errors}");
    assert!(rules.contains("meta skuid 1337 accept") && rules.contains("redirect to :15006"), "{rules}");
    for (arguments, problem) in [
        (&["intercept", "-m", "TPROXY"][..], "TPROXY is not supported"),
        (&["intercept", "--redirect-dns"], "DNS capture is not supported"),
        (&["intercept", "-u", "0"], "0 is root"),
        (&["intercept", "-d", "http"], "\"http\" is not valid"),
        (&["--bootstrap", "b.yaml", "intercept"], "cannot be used with"),
    ] {
        let (code, _, errors) = run(arguments);
        assert!(code == Some(2) && errors.contains(problem), "{errors}");
    }
}

/// `tests/admin.rs` covers requests from other hosts.
#[tokio::test]
async fn web_pages_of_other_origins_can_neither_read_nor_change_anything() {
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), "node: {id: a}\n").await;
    for (fields, expected) in [
        ("host: evil.example", "DNS rebinding"),
        ("host: localhost\r\norigin: http://evil.example", "another origin"),
        ("host: localhost\r\nsec-fetch-site: cross-site", "another origin"),
    ] {
        for (method, path) in
            [("GET", "/config_dump"), ("POST", "/quitquitquit"), ("POST", "/logging?level=off"), ("GET", "/")]
        {
            let answer = program.page_with(method, path, fields).await;
            assert!(
                answer.starts_with("HTTP/1.1 403 ") && answer.contains(expected),
                "{method} {path}: {answer}"
            );
        }
        for path in ["/ready", "/healthz/ready", "/stats/prometheus"] {
            let answer = program.page_with("GET", path, fields).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        }
    }
    let log = program.quit().await;
    assert!(log.contains("quit requested, draining"), "{log}");
}

#[tokio::test]
async fn a_reader_of_the_log_that_stops_delays_no_request() {
    let folder = tempfile::tempdir().unwrap();
    // No filter chain matches, which is logged per connection.
    let bootstrap = r#"
static_resources:
  listeners:
  - name: l
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filter_chain_match: {destination_port: 1}
      filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: c
  clusters:
  - name: c
    type: STATIC
    load_assignment: {cluster_name: c}
"#;
    let mut program = Program::start(folder.path(), bootstrap).await;
    let server = program.listener("l").await;
    program.page("POST", "/logging?level=debug").await;
    // Far more than fits into the pipe without a reader.
    for _ in 0..2_000 {
        let mut client = Client::new(TcpStream::connect(server).await.unwrap());
        assert_eq!(client.rest().await, "");
    }
    assert!(program.page("GET", "/ready").await.ends_with("LIVE\n"));
    program.page("POST", "/logging?level=info").await;
    for _ in 0..2_000 {
        program.until("no filter chain of listener l matches").await;
    }
}

/// Replaces a file as tools that rotate certificates do.
fn replace(folder: &Path, name: &str, content: &str) {
    fs::write(folder.join("new"), content).unwrap();
    fs::rename(folder.join("new"), folder.join(name)).unwrap();
}

/// Issues a certificate into `NAME.pem` and `NAME.key`.
fn issue(folder: &Path, name: &str, account: &str) {
    let authority = Authority::ephemeral().unwrap();
    let request = KeyAndCsr::generate(None).unwrap();
    let id = skysail_core::SpiffeId::new("cluster.local", "default", account);
    let signed = authority.sign(&request.csr_pem, &id, Duration::from_secs(3600)).unwrap();
    replace(folder, &format!("{name}.pem"), &signed.pem());
    replace(folder, &format!("{name}.key"), &request.key_pem());
}

/// Returns the account of a server's certificate.
async fn account(server: SocketAddr) -> String {
    let connector = tokio_rustls::TlsConnector::from(Arc::clone(&TlsSpec::default().client().unwrap()));
    let tcp = TcpStream::connect(server).await.unwrap();
    let tls = within(connector.connect("a".try_into().unwrap(), tcp)).await.unwrap();
    mesh::account(&tls)
}

async fn until_account(server: SocketAddr, wanted: &str) {
    within(async {
        while account(server).await != wanted {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn secrets_in_files_are_watched() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap();
    let secrets = |name: &str| {
        format!(
            r#"
resources:
- "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret
  name: server
  tls_certificate:
    certificate_chain: {{filename: {home}/{name}.pem}}
    private_key: {{filename: {home}/{name}.key}}
"#
        )
    };
    issue(folder.path(), "a", "first");
    replace(folder.path(), "secrets.yaml", &secrets("a"));
    let bootstrap = format!(
        r#"
static_resources:
  listeners:
  - name: l
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            tls_certificate_sds_secret_configs:
            - name: server
              sds_config: {{path_config_source: {{path: {home}/secrets.yaml}}}}
      filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: c
  clusters:
  - name: c
    type: STATIC
    load_assignment: {{cluster_name: c}}
"#
    );
    let mut program = Program::start(folder.path(), &bootstrap).await;
    let server = program.listener("l").await;
    assert_eq!(account(server).await, "first");
    issue(folder.path(), "a", "second");
    until_account(server, "second").await;
    // Invalid content changes nothing, and later valid content is accepted.
    replace(folder.path(), "secrets.yaml", "resources: [");
    program.until("cannot use the secret's files; the current secret stays in use").await;
    assert_eq!(account(server).await, "second");
    issue(folder.path(), "b", "third");
    replace(folder.path(), "secrets.yaml", &secrets("b"));
    until_account(server, "third").await;
}

#[tokio::test]
async fn an_ejected_endpoint_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let good = support::echo().await;
    let bootstrap = format!(
        r#"
static_resources:
  listeners:
  - name: l
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: c
  clusters:
  - name: c
    type: STATIC
    outlier_detection: {{consecutive_5xx: 1, max_ejection_percent: 50}}
    load_assignment:
      cluster_name: c
      endpoints:
      - locality: {{region: r, zone: z}}
        lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 1}}}}}}
"#,
        good.port()
    );
    let mut program = Program::start(folder.path(), &bootstrap).await;
    let listeners = program.page("GET", "/listeners").await;
    let address: SocketAddr =
        listeners.lines().find_map(|line| line.strip_prefix("l::")).unwrap().parse().unwrap();
    for _ in 0..2 {
        let mut client = Client::new(TcpStream::connect(address).await.unwrap());
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        client.message_if_any().await;
    }
    let line = program.until("is ejected").await;
    assert!(
        line.contains("endpoint 127.0.0.1:1 of cluster c is ejected for 30s: too many 5xx in a row"),
        "{line}"
    );
    let clusters = program.page("GET", "/clusters").await;
    assert!(clusters.contains("c::127.0.0.1:1::health_flags::/failed_outlier_check\n"), "{clusters}");
    assert!(clusters.contains(&format!("c::{good}::health_flags::healthy\n")), "{clusters}");
    assert!(clusters.contains(&format!("c::{good}::zone::z\n")), "{clusters}");
    let metrics = program.page("GET", "/stats/prometheus").await;
    let active = "envoy_cluster_outlier_detection_ejections_active{cluster_name=\"c\"} 1\n";
    assert!(metrics.contains(active), "{metrics}");
}
