//! Runs a real Envoy instead of the sidecar, and does what Istio's agent does beside Envoy.
//!
//! Envoy requests its certificate by SDS from a local server and everything else from the control plane. This
//! module obtains and renews the certificate, serves it over a Unix socket, and starts Envoy with a bootstrap
//! that refers to both. Public builds of Envoy lack Istio's own filters: the node metadata says so, and the
//! control plane omits them. On termination, Envoy's listeners are drained before Envoy is stopped.

use std::{
    path::{Path, PathBuf},
    pin::Pin,
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::{Map, Value, json};
use skysail_core::{names, shutdown};
use skysail_proto::Codec as _;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            config::core::v3::{DataSource, WatchedDirectory, data_source::Specifier},
            extensions::transport_sockets::tls::v3::{
                CertificateValidationContext, Secret, TlsCertificate, secret,
            },
            service::{
                discovery::v3::{
                    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
                },
                secret::v3::secret_discovery_service_server::{
                    SecretDiscoveryService, SecretDiscoveryServiceServer,
                },
            },
        },
        google::protobuf::Any,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixListener},
    process::{Child, Command},
    sync::{mpsc, watch},
    time::{sleep, timeout},
};
use tokio_stream::{
    Stream,
    wrappers::{ReceiverStream, UnixListenerStream},
};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    app::{args::Common, settings, status},
    discovery::secrets::{CONTROL_PLANE, Issued, Mesh, OwnCertificate, secret_of_files},
};

/// Node metadata key that makes the control plane omit the filters that only Istio's build of Envoy has.
const PLAIN_ENVOY: &str = "SKYSAIL_PLAIN_ENVOY";

/// First version of Envoy that accepts virtual hosts (VHDS) over the aggregated stream.
const FIRST_WITH_VIRTUAL_HOSTS: (u32, u32) = (1, 37);

/// Interval between checks for open downstream connections during a drain.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Parameters to run Envoy with.
pub(crate) struct Envoy {
    /// Executable of Envoy.
    pub(crate) program: PathBuf,
    /// Address and credentials of the control plane.
    pub(crate) mesh: Mesh,
    /// Node in JSON.
    pub(crate) node: Value,
    pub(crate) common: Common,
}

impl Envoy {
    /// Runs Envoy until it exits or a signal terminates the process.
    ///
    /// # Errors
    /// Envoy cannot be started, or exits by itself.
    pub(crate) async fn run(&self, own: OwnCertificate) -> anyhow::Result<()> {
        let mut terminate = std::pin::pin!(shutdown::terminate());
        let folder = Folder::new()?;
        let socket = folder.0.join("sds.sock");
        let listener =
            UnixListener::bind(&socket).context("cannot listen for Envoy's requests for secrets")?;
        let (sender, issued) = watch::channel(None);
        let secrets = SecretDiscoveryServiceServer::new(SecretServer(issued));
        let served = tonic::transport::Server::builder()
            .add_service(secrets)
            .serve_with_incoming(UnixListenerStream::new(listener));
        let mut node = node(&self.node)?;
        node["metadata"][names::TAKES_RESOLVED_NAMES] = "true".into();
        if takes_virtual_hosts(&self.program).await {
            node["metadata"][names::TAKES_VIRTUAL_HOSTS] = "true".into();
        }
        let bootstrap = folder.0.join("bootstrap.json");
        let text = serde_json::to_vec(&self.bootstrap(&node, &socket))?;
        std::fs::write(&bootstrap, text).with_context(|| format!("cannot write {}", bootstrap.display()))?;
        let merged = self.common.merged_metrics_port.unwrap_or(names::MERGED_METRICS_PORT);
        let merged = (std::net::Ipv4Addr::UNSPECIFIED, merged).into();
        status::serve(merged, self.metrics(), self.common.mark, axum::Router::new()).await?;
        let mut envoy = self.start(&bootstrap, &node["metadata"]["PROXY_CONFIG"])?;
        tokio::select! {
            status = envoy.wait() => bail!("Envoy exited by itself: {}", status?),
            ended = served => bail!("the SDS server ended: {ended:?}"),
            never = own.keep(|issued| { sender.send_replace(Some(Arc::new(issued))); Ok(()) }) => match never {},
            signal = &mut terminate => tracing::info!(signal = signal?, "draining Envoy"),
        }
        match timeout(self.common.drain(), self.drain()).await {
            Ok(Ok(())) => tracing::info!("drained"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot drain Envoy through its admin page"),
            Err(_) => tracing::info!("drain timeout reached; some connections are still open"),
        }
        end(&mut envoy).await
    }

    /// Drains Envoy's listeners (`connection: close`, GOAWAY) and waits until no downstream connection is open.
    async fn drain(&self) -> anyhow::Result<()> {
        self.request("POST", "/drain_listeners?graceful").await?;
        let own = [self.health(), self.metrics()].map(|port| format!("0.0.0.0_{port}"));
        loop {
            let stats = self.request("GET", "/stats?filter=downstream_cx_active").await?;
            if open_connections(&stats, &own) == 0 {
                return Ok(());
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Sends a request to Envoy's admin page and returns the response.
    async fn request(&self, method: &str, path: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.admin())).await?;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let good = answer.starts_with("HTTP/1.1 200");
        let refused = || std::io::Error::other(answer.lines().next().unwrap_or("no answer").to_owned());
        if good { Ok(answer) } else { Err(refused()) }
    }

    fn admin(&self) -> u16 {
        self.common.admin_port.unwrap_or(names::ADMIN_PORT)
    }

    fn health(&self) -> u16 {
        self.common.health_port.unwrap_or(names::HEALTH_PORT)
    }

    fn metrics(&self) -> u16 {
        self.common.metrics_port.unwrap_or(names::METRICS_PORT)
    }

    /// Starts Envoy. `config` are the settings of the node.
    fn start(&self, bootstrap: &Path, config: &Value) -> anyhow::Result<Child> {
        // Time in which connections of a changed listener end.
        let drain = config["drainDuration"]
            .as_str()
            .and_then(settings::duration)
            .unwrap_or_else(|| self.common.drain());
        Command::new(&self.program)
            .arg("--config-path")
            .arg(bootstrap)
            .args(["--concurrency", &self.common.concurrency().to_string()])
            .args(["--disable-hot-restart", "--log-level", "warning"])
            // As Istio's agent does: during a drain every response tells its client to close the connection.
            .args(["--drain-time-s", &drain.as_secs().max(1).to_string()])
            .args(["--drain-strategy", "immediate"])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start Envoy, {}", self.program.display()))
    }

    /// Returns a bootstrap like that of Istio's agent: ADS over TLS with the certificate from SDS, readiness
    /// and metrics on their usual ports.
    fn bootstrap(&self, node: &Value, secrets: &Path) -> Value {
        let (admin, health, metrics) = (self.admin(), self.health(), self.metrics());
        let ads = json!({"ads": {}, "resource_api_version": "V3"});
        let mut bootstrap = json!({
            "node": node,
            "admin": {"address": address("127.0.0.1", admin)},
            "dynamic_resources": {
                "lds_config": ads,
                "cds_config": ads,
                "ads_config": {
                    "api_type": "DELTA_GRPC",
                    "transport_api_version": "V3",
                    "set_node_on_first_message_only": true,
                    "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
                },
            },
            "static_resources": {
                "clusters": [
                    self.discovery_cluster(),
                    cluster("sds-grpc", "STATIC", json!({"pipe": {"path": secrets}}), true),
                    cluster("admin", "STATIC", address("127.0.0.1", admin), false),
                ],
                "listeners": [
                    page("readiness", health, "/healthz/ready", "/ready"),
                    page("metrics", metrics, "/stats/prometheus", "/stats/prometheus"),
                ],
            },
        });
        let config = &node["metadata"]["PROXY_CONFIG"];
        if let Some(values) = config["runtimeValues"].as_object() {
            bootstrap["layered_runtime"] = runtime_layers(values);
        }
        if !config["proxyStatsMatcher"].is_null() {
            bootstrap["stats_config"] = statistics(&config["proxyStatsMatcher"]);
        }
        if let Some(mark) = self.common.mark {
            bootstrap["cluster_manager"] = json!({"upstream_bind_config": {"socket_options": [{
                // SO_MARK at level SOL_SOCKET.
                "level": 1, "name": 36, "int_value": mark, "state": "STATE_PREBIND",
            }]}});
        }
        bootstrap
    }

    fn discovery_cluster(&self) -> Value {
        let kind = if self.mesh.host.parse::<std::net::IpAddr>().is_ok() { "STATIC" } else { "STRICT_DNS" };
        let mut cluster = cluster("xds-grpc", kind, address(&self.mesh.host, self.mesh.port), true);
        let secret = |name: &str| {
            json!({
                "name": name,
                "sds_config": {
                    "resource_api_version": "V3",
                    "api_config_source": {
                        "api_type": "GRPC",
                        "transport_api_version": "V3",
                        "grpc_services": [{"envoy_grpc": {"cluster_name": "sds-grpc"}}],
                    },
                },
            })
        };
        cluster["transport_socket"] = json!({
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "sni": CONTROL_PLANE,
                "common_tls_context": {
                    "alpn_protocols": ["h2"],
                    "tls_certificate_sds_secret_configs": [secret("default")],
                    "combined_validation_context": {
                        "default_validation_context": {
                            "match_typed_subject_alt_names": [
                                {"san_type": "DNS", "matcher": {"exact": CONTROL_PLANE}},
                            ],
                        },
                        // Not the root file: Envoy would read it once, and the root may be replaced.
                        "validation_context_sds_secret_config": secret("ROOTCA"),
                    },
                },
            },
        });
        cluster
    }
}

/// Returns the layers of the runtime: these values, then those that the admin page sets.
fn runtime_layers(values: &Map<String, Value>) -> Value {
    let typed = values.iter().filter_map(|(key, value)| {
        let value = match value.as_str()? {
            // In Istio it removes a default, of which there are none here.
            "" => return None,
            "true" => true.into(),
            "false" => false.into(),
            _ => value.clone(),
        };
        Some((key.clone(), value))
    });
    let own: Map<String, Value> = typed.collect();
    json!({"layers": [{"name": "own", "static_layer": own}, {"name": "admin", "admin_layer": {}}]})
}

/// Statistics that every Envoy has: those that Istio's proxies have, and what a drain reads.
const STATISTICS: [(&str, &str); 10] = [
    ("prefix", "cluster_manager"),
    ("prefix", "listener_manager"),
    ("prefix", "server"),
    ("prefix", "cluster.xds-grpc"),
    ("prefix", "wasm"),
    ("suffix", "rbac.allowed"),
    ("suffix", "rbac.denied"),
    ("suffix", "shadow_allowed"),
    ("suffix", "shadow_denied"),
    ("suffix", "downstream_cx_active"),
];
/// Expression of further such statistics: those of a route with `statPrefix`.
const ROUTE_STATISTICS: &str = r"vhost\..*\.route\..*";

/// Returns the configuration of the statistics of Envoy: those that it always has, and those of the setting.
fn statistics(matcher: &Value) -> Value {
    let of = |field: &'static str, kind: &'static str| {
        let names = matcher[field].as_array().into_iter().flatten().cloned();
        names.map(move |name| match kind {
            "safe_regex" => json!({kind: {"regex": name}}),
            _ => json!({kind: name}),
        })
    };
    let own = STATISTICS.iter().map(|(kind, name)| json!({*kind: name}));
    let routes = json!({"safe_regex": {"regex": ROUTE_STATISTICS}});
    let all: Vec<Value> = own
        .chain([routes])
        .chain(of("inclusionPrefixes", "prefix"))
        .chain(of("inclusionSuffixes", "suffix"))
        .chain(of("inclusionRegexps", "safe_regex"))
        .collect();
    json!({"stats_matcher": {"inclusion_list": {"patterns": all}}})
}

/// Returns the node, marked as a public build of Envoy.
fn node(node: &Value) -> anyhow::Result<Value> {
    let mut node = node.clone();
    let Some(fields) = node.as_object_mut() else { bail!("the node is not a JSON object") };
    // Envoy sets these fields itself.
    for field in ["userAgentName", "userAgentBuildVersion", "clientFeatures"] {
        fields.remove(field);
    }
    node["metadata"][PLAIN_ENVOY] = "true".into();
    // Envoy reports no health.
    if let Some(settings) = node["metadata"]["PROXY_CONFIG"].as_object_mut() {
        settings.remove("readinessProbe");
    }
    Ok(node)
}

/// Returns whether this Envoy accepts virtual hosts (VHDS), judged by its version.
async fn takes_virtual_hosts(program: &Path) -> bool {
    let output = Command::new(program).arg("--version").output().await;
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    version(&text).is_some_and(|version| version >= FIRST_WITH_VIRTUAL_HOSTS)
}

/// Parses the version out of `PATH/envoy  version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL`.
fn version(text: &str) -> Option<(u32, u32)> {
    let (_, build) = text.rsplit_once("version: ")?;
    let mut numbers = build.split('/').nth(1)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn address(host: &str, port: u16) -> Value {
    json!({"socket_address": {"address": host, "port_value": port}})
}

fn cluster(name: &str, kind: &str, address: Value, http2: bool) -> Value {
    let mut cluster = json!({
        "name": name,
        "type": kind,
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    });
    if http2 {
        cluster["typed_extension_protocol_options"] = json!({
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            },
        });
    }
    cluster
}

/// Returns a listener that serves one page of the admin interface.
fn page(name: &str, port: u16, path: &str, admin: &str) -> Value {
    json!({
        "name": name,
        "address": address("0.0.0.0", port),
        "filter_chains": [{"filters": [{
            "name": "envoy.filters.network.http_connection_manager",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                "stat_prefix": name,
                "route_config": {"virtual_hosts": [{
                    "name": name,
                    "domains": ["*"],
                    "routes": [{
                        "match": {"path": path},
                        "route": {"cluster": "admin", "prefix_rewrite": admin},
                    }],
                }]},
                "http_filters": [{
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
                }],
            },
        }]}],
    })
}

/// Counts open downstream connections in Envoy's statistics (`listener.ADDRESS.downstream_cx_active: N`). The
/// admin page's and those of the excluded addresses do not count.
fn open_connections(stats: &str, excluded: &[String]) -> u64 {
    let open = |line: &str| -> Option<u64> {
        let (name, number) = line.split_once(": ")?;
        let address = name.strip_prefix("listener.")?.strip_suffix(".downstream_cx_active")?;
        let counts = !address.starts_with("admin")
            && !address.contains(".worker_")
            && !excluded.iter().any(|it| it == address);
        number.trim().parse().ok().filter(|_| counts)
    };
    stats.lines().filter_map(open).sum()
}

/// Sends SIGTERM to Envoy and waits for it to exit.
async fn end(envoy: &mut Child) -> anyhow::Result<()> {
    if let Some(id) = envoy.id().and_then(|id| i32::try_from(id).ok()) {
        // `kill` fails only if Envoy has already exited.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::SIGTERM);
    }
    envoy.wait().await.context("cannot wait for Envoy")?;
    Ok(())
}

/// A private directory, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let path = std::env::temp_dir().join(format!("skysail-envoy-{:016x}", fastrand::u64(..)));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make the folder {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// SDS server of the secrets `default` and `ROOTCA`, and of those with the names of files.
struct SecretServer(watch::Receiver<Option<Arc<Issued>>>);

#[tonic::async_trait]
impl SecretDiscoveryService for SecretServer {
    type StreamSecretsStream = ReceiverStream<Result<DiscoveryResponse, Status>>;
    type DeltaSecretsStream = Pin<Box<dyn Stream<Item = Result<DeltaDiscoveryResponse, Status>> + Send>>;

    async fn stream_secrets(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamSecretsStream>, Status> {
        let (sender, responses) = mpsc::channel(1);
        let (mut requests, mut issued) = (request.into_inner(), self.0.clone());
        tokio::spawn(async move {
            let Ok(Some(first)) = requests.message().await else { return };
            for nonce in 1_u64.. {
                let Ok(now) = issued.wait_for(Option::is_some).await.map(|now| now.clone()) else { return };
                let resources =
                    now.iter().flat_map(|issued| resources(issued, &first.resource_names)).collect();
                let response = DiscoveryResponse {
                    version_info: nonce.to_string(),
                    nonce: nonce.to_string(),
                    type_url: Kind::Secret.url().to_owned(),
                    resources,
                    ..DiscoveryResponse::default()
                };
                if sender.send(Ok(response)).await.is_err() {
                    return;
                }
                loop {
                    tokio::select! {
                        changed = issued.changed() => match changed {
                            Ok(()) => break,
                            Err(_) => return,
                        },
                        message = requests.message() => match message {
                            Ok(Some(DiscoveryRequest { error_detail: Some(error), .. })) => {
                                tracing::warn!(reason = error.message, "Envoy rejected a secret");
                            }
                            Ok(Some(_)) => {}
                            _ => return,
                        },
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(responses)))
    }

    async fn delta_secrets(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        Err(Status::unimplemented("the SDS server supports only the state-of-the-world protocol"))
    }

    async fn fetch_secrets(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("the SDS server supports only streaming requests"))
    }
}

/// Returns the secrets with the requested names.
fn resources(issued: &Issued, names: &[String]) -> Vec<Any> {
    let inline = |pem: &str| {
        Some(DataSource {
            specifier: Some(Specifier::InlineBytes(pem.as_bytes().to_vec())),
            ..DataSource::default()
        })
    };
    let secret = |name: &str| match name {
        "default" => Some(secret::Type::TlsCertificate(TlsCertificate {
            certificate_chain: inline(&issued.chain_pem),
            private_key: inline(&issued.key_pem),
            ..TlsCertificate::default()
        })),
        "ROOTCA" => Some(secret::Type::ValidationContext(CertificateValidationContext {
            trusted_ca: inline(&issued.roots_pem),
            ..CertificateValidationContext::default()
        })),
        name => secret_of_files(name)?.r#type.map(watched),
    };
    let encode = |name: &String| {
        let secret = Secret { name: name.clone(), r#type: Some(secret(name)?) };
        Some(Any { type_url: Kind::Secret.url().to_owned(), value: secret.to_vec() })
    };
    names.iter().filter_map(encode).collect()
}

/// Lets Envoy, which reads the files of a secret itself, read them again after a change in their folder.
fn watched(mut content: secret::Type) -> secret::Type {
    let folder = |file: Option<&DataSource>| {
        let Some(Specifier::Filename(path)) = file?.specifier.as_ref() else { return None };
        let path = Path::new(path).parent()?.to_string_lossy().into_owned();
        Some(WatchedDirectory { path, ..WatchedDirectory::default() })
    };
    match &mut content {
        secret::Type::TlsCertificate(of) => of.watched_directory = folder(of.certificate_chain.as_ref()),
        secret::Type::ValidationContext(of) => of.watched_directory = folder(of.trusted_ca.as_ref()),
        _ => {}
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_parsed() {
        let text = "\n/usr/bin/envoy  version: 88bb6ba8c06dc2e3db8fd5e5b9fbd2ff9e53b0f1/1.40.0/Clean/RELEASE/BoringSSL\n";
        assert_eq!(version(text), Some((1, 40)));
        assert_eq!(version("command not found"), None);
    }

    #[test]
    fn only_connections_of_the_mesh_are_counted() {
        let stats = "HTTP/1.1 200 OK\r\ndate: now\r\n\r\n1f\r\n\
            http.admin.downstream_cx_active: 9\n\
            listener.0.0.0.0_15006.downstream_cx_active: 2\n\
            listener.0.0.0.0_15006.worker_0.downstream_cx_active: 2\n\
            listener.0.0.0.0_15090.downstream_cx_active: 9\n\
            listener.10.96.0.1_80.downstream_cx_active: 1\n\
            listener.admin.downstream_cx_active: 1\n\
            listener.admin.main_thread.downstream_cx_active: 1\n";
        assert_eq!(open_connections(stats, &["0.0.0.0_15021".to_owned(), "0.0.0.0_15090".to_owned()]), 3);
    }
}
