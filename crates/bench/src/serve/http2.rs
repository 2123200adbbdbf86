//! The server over HTTP/2 with prior knowledge: answers each request with its own body.

use std::{convert::Infallible, net::TcpListener};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::Response;
use tokio::{net::TcpStream, task::LocalSet};

/// Window of a connection, large enough that no WINDOW_UPDATE is needed. The time of such frames, and whether they
/// are sent with other frames, would be random.
pub(crate) const WINDOW: u32 = 1 << 30;

/// Serves the connections of this listener.
pub(super) fn serve(listener: TcpListener) -> anyhow::Result<Infallible> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            // An error ends the connection, which the client notices.
            tokio::task::spawn_local(async { drop(connection(stream).await) });
        }
    })
}

async fn connection(stream: TcpStream) -> Result<(), h2::Error> {
    let mut connection =
        h2::server::Builder::new().initial_connection_window_size(WINDOW).handshake(stream).await?;
    while let Some(request) = connection.accept().await {
        let (request, answer) = request?;
        tokio::task::spawn_local(async { drop(echo(request.into_body(), answer).await) });
    }
    Ok(())
}

/// Answers once the request is complete, in as many frames as it had.
async fn echo(mut body: RecvStream, mut answer: SendResponse<Bytes>) -> Result<(), h2::Error> {
    let mut parts = Vec::with_capacity(1);
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        parts.push(data);
    }
    let head = Response::builder().header("content-type", "text/plain").header("server", "skysail-bench");
    let Ok(head) = head.body(()) else { return Ok(()) };
    let mut stream = answer.send_response(head, parts.is_empty())?;
    while !parts.is_empty() {
        let part = parts.remove(0);
        stream.send_data(part, parts.is_empty())?;
    }
    Ok(())
}
