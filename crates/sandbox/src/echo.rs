//! The echo server, which runs in place of unknown images: it returns and logs each request.
//!
//! [`http`] answers HTTP of both versions with a report, [`grpc`] answers gRPC calls on the same ports, and [`tcp`]
//! returns all bytes. The page docs/stand-ins.md describes it for users.

mod grpc;
mod http;
mod tcp;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use axum::Router;
use skysail_core::{logging, shutdown};
use tokio::{net::TcpListener, sync::watch, task::JoinSet};

/// Arguments of the echo server.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Port to listen on, and its protocol: `http` (the default; also HTTP/2 and gRPC) or `tcp`, which returns all
    /// bytes. May be given several times. Without it, the program waits for a signal.
    #[arg(long = "port", value_name = "PORT[/PROTOCOL]", value_parser = listen)]
    ports: Vec<Listen>,
    /// Exit at once with code 0, as the stand-in of a Job.
    #[arg(long, conflicts_with = "ports")]
    done: bool,
    #[command(flatten)]
    pod: PodIdentity,
}

/// Pod that the server reports.
#[derive(Clone, Debug, Default, clap::Args)]
struct PodIdentity {
    /// The pod's name, reported in every answer.
    #[arg(id = "pod", long = "pod", env = "SKYSAIL_ECHO_POD", default_value = "")]
    name: String,
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

/// A listener and its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Listen {
    port: u16,
    protocol: Protocol,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Http,
    Tcp,
}

fn listen(text: &str) -> Result<Listen, String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "http"));
    let port = port.parse().map_err(|_| format!("{port:?} is not a port"))?;
    let protocol = match protocol {
        "http" => Protocol::Http,
        "tcp" => Protocol::Tcp,
        other => return Err(format!("unknown protocol {other:?}: write http or tcp")),
    };
    Ok(Listen { port, protocol })
}

/// Serves until SIGTERM or SIGINT, then finishes the requests in progress.
///
/// # Errors
/// When a port cannot be bound.
pub fn run(args: Args) -> io::Result<()> {
    if args.done {
        return Ok(());
    }
    let _flush = logging::init(logging::Format::Text);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(args))
}

async fn serve(args: Args) -> io::Result<()> {
    let (end, ending) = watch::channel(false);
    let mut servers = JoinSet::new();
    let app = Router::new().fallback(http::answer).with_state(Arc::new(args.pod));
    for Listen { port, protocol } in args.ports {
        let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).await?;
        let (app, mut ending) = (app.clone(), ending.clone());
        servers.spawn(async move {
            let ended = async move {
                let _ = ending.wait_for(|ending| *ending).await;
            };
            match protocol {
                Protocol::Http => axum::serve(listener, app).with_graceful_shutdown(ended).await,
                // Clients decide when a TCP connection ends, so the server does not wait for it.
                Protocol::Tcp => tokio::select! {
                    () = ended => Ok(()),
                    never = tcp::serve(listener) => match never {},
                },
            }
        });
    }
    shutdown::terminate().await?;
    end.send_replace(true);
    while let Some(server) = servers.join_next().await {
        server.map_err(io::Error::other)??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use axum::http::Request;

    /// Serves HTTP on a free port.
    async fn server() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().fallback(http::answer).with_state(Arc::default());
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    }

    #[tokio::test]
    async fn the_health_service_reports_serving() {
        let limit = Duration::from_secs(60);
        let server = format!("http://{}", server().await);
        let health = crate::http::grpc_health(&server, None, "a.B", limit).await;
        assert!(health.unwrap().is_serving());
    }

    /// Each message returns before the next one is sent, and the status comes last.
    #[tokio::test]
    async fn grpc_messages_are_returned_one_by_one() {
        let stream = tokio::net::TcpStream::connect(server().await).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let call = |path: &str| {
            let request =
                Request::post(format!("http://echo{path}")).header("content-type", "application/grpc");
            request.header("grpc-encoding", "gzip").body(()).unwrap()
        };
        let (answer, mut sending) = client.send_request(call("/a.B/Talk"), false).unwrap();
        sending.send_data("\0\0\0\0\u{1}a".into(), false).unwrap();
        let answer = answer.await.unwrap();
        assert_eq!(answer.headers()["grpc-encoding"], "gzip");
        let mut messages = answer.into_body();
        assert_eq!(messages.data().await.unwrap().unwrap(), "\0\0\0\0\u{1}a");
        sending.send_data("\0\0\0\0\u{1}b".into(), true).unwrap();
        assert_eq!(messages.data().await.unwrap().unwrap(), "\0\0\0\0\u{1}b");
        assert_eq!(messages.trailers().await.unwrap().unwrap()["grpc-status"], "0");
        let (answer, _) = client.send_request(call("/grpc.health.v1.Health/Watch"), true).unwrap();
        assert_eq!(answer.await.unwrap().headers()["grpc-status"], "12");
    }

    #[test]
    fn a_port_may_name_its_protocol() {
        let read = |text: &str| listen(text).map(|listen| (listen.port, listen.protocol));
        assert_eq!(read("80"), Ok((80, Protocol::Http)));
        assert_eq!(read("80/http"), Ok((80, Protocol::Http)));
        assert_eq!(read("6379/tcp"), Ok((6379, Protocol::Tcp)));
        for wrong in ["", "x", "70000", "80/", "80/udp", "80/tcp/http"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
