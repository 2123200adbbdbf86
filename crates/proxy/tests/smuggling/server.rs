//! The server behind the proxy: it answers every complete request and records its bytes.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use skysail_policy::config::Cluster;

use crate::support::{Proxy, cluster, http, listener};

/// Fields that the proxy adds to every request.
const ADDED: &str = "x-forwarded-proto: http\r\nx-envoy-attempt-count: 1\r\n";
/// Default response.
const FINE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine";

/// The server.
#[derive(Clone, Default)]
pub(crate) struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    requests: Vec<String>,
    answer: Option<&'static [u8]>,
}

impl Server {
    pub(crate) async fn start() -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self::default();
        let shared = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(shared.clone().serve(stream));
            }
        });
        (server, address)
    }

    async fn serve(self, mut stream: TcpStream) {
        let (mut input, mut block) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = stream.read(&mut block).await {
            input.extend_from_slice(&block[..count]);
            while let Some(end) = message(&input) {
                let request = String::from_utf8_lossy(&input[..end]).into_owned();
                input.drain(..end);
                let answer = {
                    let mut state = self.0.lock().unwrap();
                    state.requests.push(request.replacen(ADDED, "", 1));
                    state.answer.take().unwrap_or(FINE)
                };
                if stream.write_all(answer).await.is_err() || answer.ends_with(b"closes") {
                    return;
                }
            }
        }
    }

    /// Sets the response to the next request.
    pub(crate) fn answer(&self, answer: &'static [u8]) {
        self.0.lock().unwrap().answer = Some(answer);
    }

    /// Returns the complete requests since the last call.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().requests)
    }
}

/// Returns the end of the first message, by a simple reference parser.
fn message(input: &[u8]) -> Option<usize> {
    let find = |what: &[u8], from: usize| {
        let at = input[from..].windows(what.len()).position(|window| window == what)?;
        Some(from + at + what.len())
    };
    let mut end = find(b"\r\n\r\n", 0)?;
    let head = String::from_utf8_lossy(&input[..end]).to_lowercase();
    if head.contains("\r\ntransfer-encoding: chunked\r\n") {
        loop {
            let line = find(b"\r\n", end)?;
            let size = std::str::from_utf8(&input[end..line - 2]).unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            if size == 0 {
                // Two empty lines, or trailers.
                return if input[line..].starts_with(b"\r\n") {
                    Some(line + 2)
                } else {
                    find(b"\r\n\r\n", line)
                };
            }
            end = line + size + 2;
            input.get(..end)?;
        }
    }
    let length = head.split("\r\ncontent-length: ").nth(1);
    end += length.map_or(0, |rest| rest.split("\r\n").next().unwrap().parse().unwrap());
    (end <= input.len()).then_some(end)
}

/// Starts a proxy in front of the server.
pub(crate) async fn proxy(server: SocketAddr) -> Proxy {
    before(cluster(&[server], None)).await
}

/// Starts a proxy in front of this cluster.
pub(crate) async fn before(cluster: Cluster) -> Proxy {
    let terminal = http(|manager, _| {
        manager.generate_request_id = false;
        manager.stream_idle_timeout = None;
    });
    Proxy::start(listener(terminal, None), vec![cluster]).await
}
