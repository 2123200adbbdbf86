//! Forwarding of TCP connections from the host into a mesh.
//!
//! A socket stays in the network namespace that it was made in. So a process binds its listeners on the host, enters
//! the network of a mesh or of a pod, and joins each connection that it accepts there with one that it makes here.

use std::{
    io,
    net::{SocketAddr, TcpListener as HostListener},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

/// Limit of the connections of one listener; further ones wait in the kernel.
const CONNECTIONS: usize = 256;
/// Limit for connecting to one address.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Pause after a failed accept, which has a lasting cause such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Binds a listener. Call it before the process enters another network.
///
/// # Errors
/// When the address is in use or forbidden; the error says so.
pub fn bind(address: SocketAddr) -> io::Result<HostListener> {
    let listener = HostListener::bind(address).map_err(|error| {
        let text = match error.kind() {
            io::ErrorKind::AddrInUse => format!("{address} is in use; choose another port"),
            io::ErrorKind::PermissionDenied => {
                format!("{address} is for root only; choose a port from 1024 on")
            }
            io::ErrorKind::AddrNotAvailable => format!("this machine has no address {}", address.ip()),
            _ => format!("listening on {address}: {error}"),
        };
        io::Error::new(error.kind(), text)
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts connections and joins each with one to the first of `targets` that accepts it. `refused` hears why there
/// was none.
///
/// # Errors
/// When the listener cannot be used at all.
pub async fn serve(
    listener: HostListener,
    targets: impl Fn() -> Vec<SocketAddr>,
    refused: impl Fn(&str) + Clone + Send + 'static,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&free).acquire_owned().await else { return Ok(()) };
        let client = match listener.accept().await {
            Ok((client, _)) => client,
            Err(error) => {
                refused(&format!("accepting a connection: {error}"));
                sleep(PAUSE).await;
                continue;
            }
        };
        let (targets, refused) = (targets(), refused.clone());
        tokio::spawn(async move {
            let _place = place;
            match connect(&targets).await {
                // Each direction ends by itself, and a reset of one ends both.
                Ok(server) => join(client, server).await,
                Err(reason) => {
                    reset(client);
                    refused(&reason);
                }
            }
        });
    }
}

async fn connect(targets: &[SocketAddr]) -> Result<TcpStream, String> {
    let mut failed = "there is no ready pod".to_owned();
    for target in targets {
        failed = match timeout(CONNECT_WITHIN, TcpStream::connect(target)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => format!("{target}: {error}"),
            Err(_) => format!("{target}: no answer within {CONNECT_WITHIN:?}"),
        };
    }
    Err(failed)
}

async fn join(mut client: TcpStream, mut server: TcpStream) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    if copy_bidirectional(&mut client, &mut server).await.is_err() {
        // An end that looks like the regular one could pass for a complete body.
        reset(client);
        reset(server);
    }
}

fn reset(stream: TcpStream) {
    let _ = stream.set_zero_linger();
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        sync::mpsc,
    };

    use super::*;

    fn any() -> HostListener {
        bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap()
    }

    /// Forwards to these targets. Returns the address, and the reasons of connections that were refused.
    fn start(targets: Vec<SocketAddr>) -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
        let (tell, told) = mpsc::unbounded_channel();
        let listener = any();
        let address = listener.local_addr().unwrap();
        let refused = move |reason: &str| tell.send(reason.to_owned()).unwrap();
        tokio::spawn(async move { serve(listener, move || targets.clone(), refused).await });
        (address, told)
    }

    fn closed() -> SocketAddr {
        any().local_addr().unwrap()
    }

    #[tokio::test]
    async fn half_closed_connections_go_on_the_other_way() {
        let server = TcpListener::from_std(any()).unwrap();
        let (address, _told) = start(vec![closed(), server.local_addr().unwrap()]);
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let (mut served, _) = server.accept().await.unwrap();
        let mut question = String::new();
        served.read_to_string(&mut question).await.unwrap();
        assert_eq!(question, "question");
        served.write_all(b"answer").await.unwrap();
        drop(served);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "answer");
    }

    #[tokio::test]
    async fn a_reset_passes_through() {
        let server = TcpListener::from_std(any()).unwrap();
        let (address, _told) = start(vec![server.local_addr().unwrap()]);
        let mut client = TcpStream::connect(address).await.unwrap();
        let (served, _) = server.accept().await.unwrap();
        reset(served);
        let error = client.read(&mut [0]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn a_connection_without_a_target_is_reset_and_told() {
        for (targets, reason) in [(vec![], "no ready pod"), (vec![closed()], "refused")] {
            let (address, mut told) = start(targets);
            let mut client = TcpStream::connect(address).await.unwrap();
            let error = client.read(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            let said = told.recv().await.unwrap();
            assert!(said.contains(reason), "{said}");
        }
    }

    #[test]
    fn a_port_in_use_is_named() {
        let listener = any();
        let error = bind(listener.local_addr().unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("is in use; choose another port"), "{error}");
    }
}
