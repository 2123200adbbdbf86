//! TCP: all bytes are returned to the client.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{self, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tracing::{info, warn};

/// Maximum number of connections of one port; further ones wait in the kernel.
const MAX_CONNECTIONS: usize = 512;
/// Pause after a failed accept, which is usually due to a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves connections. Does not return.
pub(super) async fn serve(listener: TcpListener) -> Infallible {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // An error means that the semaphore is closed, which never happens.
        let permit = Arc::clone(&free).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, peer)) => {
                tokio::spawn(async move {
                    echo(stream, peer).await;
                    drop(permit);
                });
            }
            Err(error) => {
                warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Returns all bytes until the client closes its side, and logs the connection.
async fn echo(mut stream: TcpStream, peer: SocketAddr) {
    let (mut from, mut to) = stream.split();
    let bytes = io::copy(&mut from, &mut to).await;
    let end = to.shutdown().await;
    match bytes {
        // Readiness probes make such connections.
        Ok(0) => {}
        Ok(bytes) => info!(%peer, bytes, error = end.err().map(tracing::field::display), "connection ended"),
        Err(error) => info!(%peer, %error, "connection failed"),
    }
}
