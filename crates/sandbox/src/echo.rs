//! The echo server that stands in for images nobody here can run: it answers with what it got.
//!
//! Paths and query make it misbehave on request, so that timeouts and retries can be tried: `/status/503`,
//! `/delay/2s`, or `?status=503&delay=200ms` on any path.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    http::StatusCode,
};
use serde_json::{Value, json};
use skysail_core::shutdown;
use tokio::{net::TcpListener, sync::watch, task::JoinSet};

/// What to listen on and what to say of itself.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// A port to listen on; may be given several times. Without any, it only waits.
    #[arg(long = "port", value_name = "PORT")]
    ports: Vec<u16>,
    /// End at once and successfully, as what stands in for a job.
    #[arg(long, conflicts_with = "ports")]
    done: bool,
    /// The pod's name, reported in every answer.
    #[arg(long, env = "SKYSAIL_ECHO_POD", default_value = "")]
    pod: String,
    /// The pod's namespace.
    #[arg(long, env = "SKYSAIL_ECHO_NAMESPACE", default_value = "")]
    namespace: String,
    /// The pod's address.
    #[arg(long, env = "SKYSAIL_ECHO_IP", default_value = "")]
    ip: String,
    /// The pod's `version` label.
    #[arg(long, env = "SKYSAIL_ECHO_VERSION", default_value = "")]
    version: String,
}

/// Longer bodies are counted, and not repeated.
const REPEATED: usize = 16 << 10;
const LONGEST_BODY: usize = 64 << 20;
const LONGEST_DELAY: Duration = Duration::from_secs(3600);

/// Serves until SIGTERM or SIGINT, then finishes what it has in hand.
///
/// # Errors
/// When a port cannot be had.
pub fn run(args: Args) -> io::Result<()> {
    if args.done {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args))
}

async fn serve(args: Args) -> io::Result<()> {
    let (end, ending) = watch::channel(false);
    let mut servers = JoinSet::new();
    let ports = args.ports.clone();
    let app = Router::new().fallback(answer).with_state(Arc::new(args));
    for port in ports {
        let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).await?;
        let (app, mut ending) = (app.clone(), ending.clone());
        servers.spawn(async move {
            let ended = async move {
                let _ = ending.wait_for(|ending| *ending).await;
            };
            axum::serve(listener, app).with_graceful_shutdown(ended).await
        });
    }
    shutdown::terminate().await?;
    end.send_replace(true);
    while let Some(server) = servers.join_next().await {
        server.map_err(io::Error::other)??;
    }
    Ok(())
}

async fn answer(State(own): State<Arc<Args>>, request: Request<Body>) -> (StatusCode, Json<Value>) {
    let (head, body) = request.into_parts();
    let wish = Wish::read(head.uri.path(), head.uri.query().unwrap_or_default());
    let body = match to_bytes(body, LONGEST_BODY).await {
        Ok(body) => body,
        Err(error) => return (StatusCode::BAD_REQUEST, Json(json!({ "error": error.to_string() }))),
    };
    if let Some(delay) = wish.delay {
        tokio::time::sleep(delay.min(LONGEST_DELAY)).await;
    }
    let mut headers: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, value) in &head.headers {
        headers
            .entry(name.as_str())
            .or_default()
            .push(String::from_utf8_lossy(value.as_bytes()).into_owned());
    }
    let headers: BTreeMap<&str, String> =
        headers.into_iter().map(|(name, values)| (name, values.join(", "))).collect();
    let caller = headers.get("x-forwarded-client-cert").and_then(|value| caller(value));
    let text = if body.len() <= REPEATED { String::from_utf8(body.to_vec()).ok() } else { None };
    let report = json!({
        "method": head.method.as_str(),
        "path": head.uri.path_and_query().map(ToString::to_string),
        "protocol": format!("{:?}", head.version),
        "headers": headers,
        "body_bytes": body.len(),
        "body": text,
        "caller": caller,
        "pod": { "name": own.pod, "namespace": own.namespace, "ip": own.ip, "version": own.version },
    });
    (wish.status, Json(report))
}

/// What the caller wants to see.
#[derive(Debug, PartialEq, Eq)]
struct Wish {
    status: StatusCode,
    delay: Option<Duration>,
}

impl Wish {
    fn read(path: &str, query: &str) -> Self {
        let mut wish = Self { status: StatusCode::OK, delay: None };
        let segments: Vec<&str> = path.split('/').collect();
        for pair in segments.windows(2) {
            wish.set(pair[0], pair[1]);
        }
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            wish.set(name, value);
        }
        wish
    }

    fn set(&mut self, name: &str, value: &str) {
        match name {
            // Answers below 200 are not final ones.
            "status" => {
                let status = value.parse().ok().filter(|code: &StatusCode| code.as_u16() >= 200);
                self.status = status.unwrap_or(self.status);
            }
            "delay" => self.delay = duration(value).or(self.delay),
            _ => {}
        }
    }
}

/// `200ms`, `2s`, `1.5s`, `2`.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * unit).ok()
}

/// The caller's identity in `x-forwarded-client-cert`: the URI of the last element, which the own sidecar wrote.
fn caller(header: &str) -> Option<String> {
    let last = header.rsplit(',').next()?;
    let uri = last.split(';').find_map(|part| part.trim().strip_prefix("URI="))?;
    Some(uri.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_read_from_path_and_query() {
        let wish = Wish::read("/status/503", "delay=200ms");
        assert_eq!(
            wish,
            Wish { status: StatusCode::SERVICE_UNAVAILABLE, delay: Some(Duration::from_millis(200)) }
        );
        assert_eq!(Wish::read("/delay/1.5s", "").delay, Some(Duration::from_millis(1500)));
        let plain = Wish { status: StatusCode::OK, delay: None };
        for path in ["/", "/status/", "/status/100", "/status/x", "/delay/-1s", "/delay/NaN"] {
            assert_eq!(Wish::read(path, ""), plain, "{path}");
        }
    }

    #[test]
    fn the_caller_is_the_last_elements_uri() {
        let header = "By=x;URI=spiffe://a/ns/b/sa/c,By=y;Hash=0;Subject=\"\";URI=spiffe://a/ns/d/sa/e";
        assert_eq!(caller(header).as_deref(), Some("spiffe://a/ns/d/sa/e"));
        assert_eq!(caller("By=x"), None);
    }
}
