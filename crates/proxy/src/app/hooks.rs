//! Commands for the lifecycle hooks of the sidecar's container: `wait` after its start, `drain` before its end.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use axum::http::{Method, StatusCode, Uri};
use tokio::time::{Instant, sleep_until, timeout};

use super::checks::{self, CheckTarget, HttpCheck};

/// Time limit of a request for readiness, and of one to drain, which waits for all workers.
const READY: Duration = Duration::from_millis(500);
const DRAIN: Duration = Duration::from_secs(10);

/// Arguments of `wait`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct WaitArgs {
    /// Page that responds with 200 when the sidecar is ready.
    #[arg(long, value_name = "URL", default_value = "http://localhost:15021/healthz/ready")]
    url: String,

    /// Time limit in seconds.
    #[arg(long, alias = "timeoutSeconds", value_name = "SECONDS", default_value_t = 60)]
    timeout_seconds: u64,

    /// Time between requests in milliseconds.
    #[arg(long, alias = "periodMillis", value_name = "MILLISECONDS", default_value_t = 500)]
    period_millis: u64,
}

/// Arguments of `drain`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DrainArgs {
    /// Page of the sidecar that begins the drain.
    #[arg(long, value_name = "URL", default_value = "http://localhost:15020/drain")]
    url: String,
}

/// Waits until the sidecar is ready.
///
/// # Errors
/// It is not ready in time.
pub(crate) fn wait(args: &WaitArgs) -> anyhow::Result<()> {
    let limit = Duration::from_secs(args.timeout_seconds);
    let period = Duration::from_millis(args.period_millis.max(1));
    runtime()?.block_on(async {
        let start = Instant::now();
        loop {
            let next = Instant::now() + period;
            match request(&Method::GET, &args.url, READY).await {
                Ok(()) => return Ok(()),
                Err(error) if start.elapsed() >= limit => {
                    return Err(error.context(format!("the sidecar is not ready after {limit:?}")));
                }
                Err(_) => sleep_until(next).await,
            }
        }
    })
}

/// Begins the drain of inbound connections.
///
/// # Errors
/// The sidecar does not answer or refuses the request.
pub(crate) fn drain(args: &DrainArgs) -> anyhow::Result<()> {
    runtime()?.block_on(request(&Method::POST, &args.url, DRAIN)).context("cannot drain the sidecar")
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot create an event loop")
}

/// Sends a request, and succeeds if the response has status 200.
async fn request(method: &Method, url: &str, limit: Duration) -> anyhow::Result<()> {
    let parsed: Uri = url.parse().with_context(|| format!("--url {url:?}"))?;
    let (Some("http"), Some(host)) = (parsed.scheme_str(), parsed.host()) else {
        bail!("--url {url:?} must be of the form http://HOST:PORT/PATH");
    };
    let path = parsed.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let check = HttpCheck { path, port: parsed.port_u16().unwrap_or(80), ..HttpCheck::default() };
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let target = CheckTarget { host, ..CheckTarget::local(None) };
    let response = timeout(limit, checks::http(&check, method, &target)).await;
    let status = response.with_context(|| format!("no answer within {limit:?}"))??.status;
    ensure!(status == StatusCode::OK, "the response has status {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    #[test]
    fn the_sidecar_is_awaited() {
        let listener =
            runtime().unwrap().block_on(TcpListener::bind("127.0.0.1:0")).unwrap().into_std().unwrap();
        let url = format!("http://localhost:{}/healthz/ready", listener.local_addr().unwrap().port());
        let args = |timeout_seconds| WaitArgs { url: url.clone(), timeout_seconds, period_millis: 10 };
        let server = std::thread::spawn(move || {
            runtime().unwrap().block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                for status in ["503 Service Unavailable", "503 Service Unavailable", "200 OK"] {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
                    let response = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                    stream.write_all(response.as_bytes()).await.unwrap();
                }
            });
        });
        let error = format!("{:#}", wait(&args(0)).unwrap_err());
        assert_eq!(
            error,
            "the sidecar is not ready after 0ns: the response has status 503 Service Unavailable"
        );
        wait(&args(60)).unwrap();
        server.join().unwrap();
        let error = format!("{:#}", drain(&DrainArgs { url: "https://a/".into() }).unwrap_err());
        assert!(error.contains("must be of the form http://HOST:PORT/PATH"), "{error}");
    }
}
