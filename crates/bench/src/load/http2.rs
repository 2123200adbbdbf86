//! Requests over HTTP/2 with prior knowledge, on one thread. Each connection has a number of streams. Each stream
//! sends its next request when the last one is answered.

use std::{cell::RefCell, net::SocketAddr, rc::Rc, time::Duration};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use h2::client::SendRequest;
use http::{Request, StatusCode};
use skysail_load::{
    grpc::{self, PING, PingMessage},
    server::WINDOW,
};
use tokio::{
    net::TcpStream,
    task::{JoinSet, LocalSet},
    time::{Instant, sleep, sleep_until},
};

use super::{Load, LoadOutcome, MAX_EXTENSION, WindowBoundary};
use crate::clock;

/// Interval of the polls for a first response after the end of the window.
const POLL: Duration = Duration::from_millis(10);

struct State {
    body: Bytes,
    in_window: bool,
    stopped: bool,
    outcome: LoadOutcome,
}

/// Applies the load until the window has ended.
pub(super) fn drive(
    load: &Load,
    streams: usize,
    on_boundary: impl FnMut(WindowBoundary),
) -> anyhow::Result<LoadOutcome> {
    ensure!(load.tls.is_none() && load.schedule.is_none(), "HTTP/2 has no schedule and no TLS");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, run(load, streams, on_boundary))
}

async fn run(
    load: &Load,
    streams: usize,
    mut on_boundary: impl FnMut(WindowBoundary),
) -> anyhow::Result<LoadOutcome> {
    let body = Bytes::from(vec![b'x'; load.payload]);
    let state = State { body, in_window: false, stopped: false, outcome: LoadOutcome::new()? };
    let state = Rc::new(RefCell::new(state));
    let begin = Instant::now() + load.warmup;
    let mut tasks = JoinSet::new();
    for _ in 0..load.connections {
        let sender = connect(load.target).await?;
        for _ in 0..streams {
            tasks.spawn_local(send_requests(sender.clone(), Rc::clone(&state)));
        }
    }
    let needs_answer = |until| state.borrow().outcome.answered_in_window == 0 && Instant::now() < until;
    for (boundary, at) in [(WindowBoundary::Begin, begin), (WindowBoundary::End, begin + load.window)] {
        let reached = async {
            sleep_until(at).await;
            while boundary == WindowBoundary::End && needs_answer(at + MAX_EXTENSION) {
                sleep(POLL).await;
            }
        };
        tokio::select! {
            () = reached => {}
            Some(ended) = tasks.join_next() => ended?.context("a connection was lost")?,
        }
        state.borrow_mut().in_window = boundary == WindowBoundary::Begin;
        on_boundary(boundary);
    }
    state.borrow_mut().stopped = true;
    let mut outcome = state.borrow().outcome.clone();
    outcome.requests = outcome.answered_in_window + outcome.unanswered;
    Ok(outcome)
}

/// Sends requests or gRPC calls over one connection, each after the former is answered.
pub(super) fn in_sequence(
    target: SocketAddr,
    is_grpc: bool,
    payload: usize,
    count: u32,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let body = if is_grpc {
            grpc::frame(&PingMessage { payload: "x".repeat(payload), ..PingMessage::default() })
        } else {
            Bytes::from(vec![b'x'; payload])
        };
        let mut sender = connect(target).await?;
        for _ in 0..count {
            sender = sender.ready().await?;
            let request = if is_grpc { call() } else { request(payload) };
            let status = exchange(&mut sender, request?, body.clone()).await?;
            ensure!(status == StatusCode::OK, "the response has status {status}");
        }
        Ok(())
    })
}

async fn connect(target: SocketAddr) -> anyhow::Result<SendRequest<Bytes>> {
    let stream = TcpStream::connect(target).await.with_context(|| format!("cannot connect to {target}"))?;
    stream.set_nodelay(true)?;
    let (sender, connection) =
        h2::client::Builder::new().initial_connection_window_size(WINDOW).handshake(stream).await?;
    tokio::task::spawn_local(async move {
        // Requests on the connection get the same error.
        let _ = connection.await;
    });
    Ok(sender)
}

/// Sends requests one after the other until the state is `stopped`. An error means that the connection is broken.
async fn send_requests(mut sender: SendRequest<Bytes>, state: Rc<RefCell<State>>) -> anyhow::Result<()> {
    while !state.borrow().stopped {
        sender = sender.ready().await?;
        let sent = clock::now();
        let body = state.borrow().body.clone();
        let answer = exchange(&mut sender, request(body.len())?, body).await;
        let mut state = state.borrow_mut();
        if !state.in_window {
            continue;
        }
        match answer {
            Ok(status) if status == StatusCode::OK => {
                let took = clock::now().saturating_sub(sent);
                state.outcome.due.saturating_record(took);
                state.outcome.sent.saturating_record(took);
                state.outcome.answered_in_window += 1;
            }
            Ok(_) => {
                state.outcome.refused += 1;
                state.outcome.answered_in_window += 1;
            }
            Err(_) => state.outcome.unanswered += 1,
        }
    }
    Ok(())
}

/// Returns the request of all measurements.
fn request(payload: usize) -> http::Result<Request<()>> {
    Request::post("http://server.mesh.local/echo")
        .header("content-type", "application/octet-stream")
        .header("user-agent", "skysail-bench")
        .header("content-length", payload)
        .body(())
}

/// Returns the head of a call.
fn call() -> http::Result<Request<()>> {
    Request::post(format!("http://server.mesh.local{PING}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("user-agent", "skysail-bench")
        .body(())
}

async fn exchange(
    sender: &mut SendRequest<Bytes>,
    request: Request<()>,
    body: Bytes,
) -> anyhow::Result<StatusCode> {
    let (answer, mut stream) = sender.send_request(request, false)?;
    stream.send_data(body, true)?;
    let answer = answer.await?;
    let status = answer.status();
    let mut body = answer.into_body();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data?.len())?;
    }
    Ok(status)
}
