//! `skysail load server`: echo servers for HTTP/1, HTTP/2, gRPC and TCP. Queries set delay, status and size of the
//! responses as in Fortio.

mod behavior;
mod burst;
mod http1;
mod http2;

use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    thread,
};

use anyhow::Context as _;
use skysail_core::{shutdown, stdio};

pub use self::{
    http1::{serve as serve_http1, serve_echo},
    http2::{WINDOW, serve_one as serve_http2},
};

/// Settings of `skysail load server`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServerArgs {
    /// Address to listen on.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    listen: IpAddr,

    /// Port of HTTP/1 and HTTP/2; 0 for a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8_080)]
    http_port: u16,

    /// Port of gRPC: health check and Fortio's ping.
    #[arg(long, value_name = "PORT", default_value_t = 8_079)]
    grpc_port: u16,

    /// Port of the TCP echo.
    #[arg(long, value_name = "PORT", default_value_t = 8_078)]
    tcp_port: u16,

    /// Threads. Default: one for each CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    threads: Option<u32>,
}

/// Serves until a signal ends the process.
///
/// # Errors
/// A port cannot be opened.
pub(crate) fn run(args: &ServerArgs) -> anyhow::Result<()> {
    let open = |port: u16| {
        let address = SocketAddr::new(args.listen, port);
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        anyhow::Ok((listener, address))
    };
    let (http, http_address) = open(args.http_port)?;
    let (grpc, grpc_address) = open(args.grpc_port)?;
    let (tcp, tcp_address) = open(args.tcp_port)?;
    let threads =
        args.threads.map_or_else(|| thread::available_parallelism().map_or(1, usize::from), |n| n as usize);
    let (failed, mut failure) = tokio::sync::mpsc::channel(1);
    for _ in 0..threads {
        let (http, tcp) = (http.try_clone()?, tcp.try_clone()?);
        let grpc = grpc.try_clone()?;
        let (handed_over, taken) = http2::channel();
        let (first, second) = (failed.clone(), failed.clone());
        thread::spawn(move || {
            first.blocking_send(http1::serve_all(&http, &tcp, &handed_over).err().map(anyhow::Error::from))
        });
        thread::spawn(move || second.blocking_send(http2::serve(grpc, taken).err()));
    }
    stdio::print(format_args!("HTTP on {http_address}, gRPC on {grpc_address}, TCP echo on {tcp_address}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| ()).map_err(Into::into),
            Some(Some(error)) = failure.recv() => Err(error).context("a server failed"),
        }
    })
}
