//! Port 15020, `/app-health/…` and `/app-lifecycle/…`: probes and lifecycle hooks of the containers of a pod, as Istio's
//! agent serves them. The kubelet has no certificate of the mesh, so the injector sends its probes here, and the sidecar
//! asks the container. [`VARIABLE`] has the original probes.
//!
//! The port is open to the network. Therefore only paths in the variable are served, nothing of a client's request is
//! passed on (the probe in the variable has all of its headers), and requests for one path share one check at a time: the
//! work does not depend on the number of clients. They share the connections of the port with the kubelet.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{Method, StatusCode, Uri},
    response::{IntoResponse as _, Response},
    routing::get,
};
use serde::Deserialize;
use tokio::{sync::watch, time::timeout};

use super::checks::{self, CheckResponse, CheckTarget, GrpcCheck, HttpCheck, SocketCheck};

/// Variable with the original probes by path, in JSON. Istio's injector sets it.
const VARIABLE: &str = "ISTIO_KUBE_APP_PROBERS";
/// Variable with the address of the pod.
const ADDRESS: &str = "INSTANCE_IP";
/// Variable that sends the probes to `localhost` instead of the address of the pod, if it is `true`.
const LOCAL_DESTINATION: &str = "REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION";
/// Prefixes of the paths of probes and of lifecycle hooks.
const PREFIXES: [&str; 2] = ["/app-health/", HOOKS];
const HOOKS: &str = "/app-lifecycle/";
/// Time limit of a probe that states none. Source: the default of Kubernetes.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time of a check. It is that of a hook, which the kubelet ends with the grace period of the pod.
const MAX_TIMEOUT: Duration = Duration::from_mins(10);

/// A probe as the injector writes it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AppProbe {
    http_get: Option<HttpCheck>,
    tcp_socket: Option<SocketCheck>,
    grpc: Option<GrpcCheck>,
    timeout_seconds: u32,
}

/// How a container is asked.
#[derive(Clone, Debug)]
enum AppCheck {
    Http(HttpCheck),
    Socket(SocketCheck),
    Grpc(GrpcCheck),
}

/// A probe that is served.
struct ServedProbe {
    path: String,
    check: AppCheck,
    limit: Duration,
    target: CheckTarget,
    /// Result of the check in progress, or of the last one.
    result: Mutex<Option<watch::Receiver<Option<CheckResponse>>>>,
    /// Whether the last check had no answer.
    is_silent: AtomicBool,
}

type Probes = HashMap<String, Arc<ServedProbe>>;

/// Returns the pages of the probes in the environment. `mark` is the `SO_MARK` of sockets.
///
/// # Errors
/// The variable is not valid.
pub(super) fn router(mark: Option<u32>) -> anyhow::Result<Router> {
    let Ok(text) = std::env::var(VARIABLE) else { return Ok(Router::new()) };
    let is_local = std::env::var(LOCAL_DESTINATION).is_ok_and(|value| value == "true");
    let address = std::env::var(ADDRESS).ok().filter(|address| !address.is_empty() && !is_local);
    let host = address.unwrap_or_else(|| checks::LOCAL.to_owned());
    let target = CheckTarget { host, mark, bypasses_interception: true };
    Ok(pages(parse(&text, &target).with_context(|| format!("variable {VARIABLE}"))?))
}

fn pages(probes: Probes) -> Router {
    let paths = PREFIXES.map(|prefix| format!("{prefix}{{*path}}"));
    let router = paths.iter().fold(Router::new(), |router, path| router.route(path, get(page)));
    router.with_state(Arc::new(probes))
}

fn parse(text: &str, target: &CheckTarget) -> anyhow::Result<Probes> {
    let all: HashMap<String, AppProbe> = serde_json::from_str(text)?;
    all.into_iter().map(|(path, probe)| Ok((path.clone(), Arc::new(probe.served(path, target)?)))).collect()
}

impl AppProbe {
    fn served(self, path: String, target: &CheckTarget) -> anyhow::Result<ServedProbe> {
        ensure!(
            PREFIXES.iter().any(|prefix| path.starts_with(prefix)),
            "{path:?} does not begin with {}",
            PREFIXES.join(" or ")
        );
        let (check, host) = match (self.http_get, self.tcp_socket, self.grpc) {
            (Some(check), None, None) => (AppCheck::Http(check.clone()), check.host),
            (None, Some(check), None) => (AppCheck::Socket(check.clone()), check.host),
            (None, None, Some(check)) => (AppCheck::Grpc(check), String::new()),
            _ => bail!("{path}: exactly one of httpGet, tcpSocket and grpc is needed"),
        };
        if !host.is_empty() && host != target.host {
            tracing::warn!("{path}: host {host:?} has no effect: the sidecar asks its own pod");
        }
        let limit = match self.timeout_seconds {
            0 if path.starts_with(HOOKS) => MAX_TIMEOUT,
            0 => TIMEOUT,
            seconds => Duration::from_secs(seconds.into()).min(MAX_TIMEOUT),
        };
        let (result, is_silent) = (Mutex::default(), AtomicBool::default());
        Ok(ServedProbe { path, check, limit, target: target.clone(), result, is_silent })
    }
}

async fn page(State(probes): State<Arc<Probes>>, uri: Uri) -> Response {
    let Some(probe) = probes.get(uri.path()) else {
        return (StatusCode::NOT_FOUND, "there is no such probe\n").into_response();
    };
    // A failure of the task ends the channel.
    let mut result = probe.start();
    let result = result.wait_for(Option::is_some).await.ok().and_then(|result| result.clone());
    match result {
        Some(CheckResponse { status, body }) => (status, body).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

impl ServedProbe {
    /// Starts a check unless one is in progress. Returns its result.
    fn start(self: &Arc<Self>) -> watch::Receiver<Option<CheckResponse>> {
        let mut last = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(result) =
            last.as_ref().filter(|result| result.borrow().is_none() && result.has_changed().is_ok())
        {
            return result.clone();
        }
        let (sender, result) = watch::channel(None);
        *last = Some(result.clone());
        let probe = Arc::clone(self);
        tokio::spawn(async move {
            let response = probe.run().await;
            sender.send_replace(Some(response));
        });
        result
    }

    /// Asks the container. Without an answer, the status is 500.
    async fn run(&self) -> CheckResponse {
        let answer = match timeout(self.limit, self.ask()).await {
            Ok(answer) => answer,
            Err(_) => Err(anyhow::anyhow!("no answer within {:?}", self.limit)),
        };
        let was_silent = self.is_silent.swap(answer.is_err(), Relaxed);
        answer.unwrap_or_else(|error| {
            if !was_silent {
                tracing::warn!("{} fails: {error:#}", self.path);
            }
            CheckResponse { status: StatusCode::INTERNAL_SERVER_ERROR, body: Bytes::new() }
        })
    }

    async fn ask(&self) -> anyhow::Result<CheckResponse> {
        let good = CheckResponse { status: StatusCode::OK, body: Bytes::new() };
        match &self.check {
            AppCheck::Http(check) => {
                let response = checks::http(check, &Method::GET, &self.target).await?;
                // A redirect to another host is a success for the kubelet, which would follow it.
                Ok(if response.status.is_redirection() { good } else { response })
            }
            AppCheck::Socket(check) => checks::socket(check.port, &self.target).await.map(|()| good),
            AppCheck::Grpc(check) => checks::grpc(check, &self.target).await.map(|()| good),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::body::to_bytes;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    fn target() -> CheckTarget {
        CheckTarget { host: "127.0.0.1".into(), mark: None, bypasses_interception: true }
    }

    async fn ask(probes: &Arc<Probes>, path: &str) -> (u16, String) {
        let response = page(State(Arc::clone(probes)), path.parse().unwrap()).await;
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 100_000).await.unwrap();
        (status, String::from_utf8(body.into()).unwrap())
    }

    #[tokio::test]
    async fn requests_for_a_path_share_one_check() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let text = format!(
            r#"{{"/app-health/a/livez": {{"httpGet": {{"path": "/", "port": {port}}}, "timeoutSeconds": 60}}}}"#
        );
        let probes = Arc::new(parse(&text, &target()).unwrap());
        let path = "/app-health/a/livez";
        let first: Vec<_> = (0..200).map(|_| probes[path].start()).collect();
        let answer = async |text: &str| {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(text.as_bytes()).await.unwrap();
        };
        answer("HTTP/1.1 418 x\r\ncontent-length: 2\r\n\r\nno").await;
        for mut result in first {
            let result = result.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            assert_eq!((result.status.as_u16(), &*result.body), (418, b"no".as_slice()));
        }
        // The next request begins another check.
        let next = ask(&probes, path);
        let response = "HTTP/1.1 204 x\r\n\r\n";
        let (next, ()) = tokio::join!(next, answer(response));
        assert_eq!(next, (204, String::new()));
        assert_eq!(ask(&probes, "/app-health/b/livez").await.0, 404);
        drop(listener);
        assert_eq!(ask(&probes, path).await.0, 500, "nothing listens");
    }

    #[test]
    fn invalid_probes_are_refused() {
        let refused = |text: &str| format!("{:#}", parse(text, &target()).err().unwrap());
        for (text, expected) in [
            (r#"{"/metrics": {"tcpSocket": {"port": 1}}}"#, "does not begin with /app-health/"),
            (r#"{"/app-health/a/livez": {}}"#, "exactly one of"),
            (r#"{"/app-health/a/livez": {"tcpSocket": {"port": 1}, "grpc": {"port": 1}}}"#, "exactly one of"),
            (r#"{"/app-health/a/livez": {"tcpSocket": {"port": "http"}}}"#, "invalid type"),
            ("[]", "invalid type"),
        ] {
            let error = refused(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn checks_have_a_time_limit() {
        let limit = |path: &str, seconds: u32| {
            let text =
                format!(r#"{{"{path}": {{"tcpSocket": {{"port": 1}}, "timeoutSeconds": {seconds}}}}}"#);
            parse(&text, &target()).unwrap()[path].limit
        };
        assert_eq!(limit("/app-health/a/readyz", 0), TIMEOUT);
        assert_eq!(limit("/app-health/a/readyz", 7), Duration::from_secs(7));
        assert_eq!(limit("/app-health/a/readyz", u32::MAX), MAX_TIMEOUT);
        assert_eq!(limit("/app-lifecycle/a/prestopz", 0), MAX_TIMEOUT);
    }
}
