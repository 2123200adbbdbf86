//! TCP: all bytes go back to where they came from.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{self, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tracing::{info, warn};

/// Connections of one port at the same time; others wait in the kernel.
const MOST: usize = 512;
/// Pause after a connection could not be taken, mostly for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves connections without end.
pub(super) async fn serve(listener: TcpListener) -> Infallible {
    let free = Arc::new(Semaphore::new(MOST));
    loop {
        // It fails only when the semaphore is closed, which nothing does.
        let place = Arc::clone(&free).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, peer)) => {
                tokio::spawn(async move {
                    echo(stream, peer).await;
                    drop(place);
                });
            }
            Err(error) => {
                warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Returns what comes until the client sends no more, and logs it.
async fn echo(mut stream: TcpStream, peer: SocketAddr) {
    let (mut from, mut to) = stream.split();
    let bytes = io::copy(&mut from, &mut to).await;
    let end = to.shutdown().await;
    match bytes {
        // Such are the connections of readiness probes.
        Ok(0) => {}
        Ok(bytes) => info!(%peer, bytes, error = end.err().map(tracing::field::display), "connection ended"),
        Err(error) => info!(%peer, %error, "connection failed"),
    }
}
