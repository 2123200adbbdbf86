//! Tests of sessions against an ordinary rustls peer, over real sockets.

use std::{future::poll_fn, io::Write as _, time::Duration};

use rustls::{ClientConnection, pki_types::ServerName};
use skysail_core::SpiffeId;
use skysail_identity::{
    Acceptor, Authority, Connector, KeyAndCsr, Live, NameMatch, PeerCheck, TlsSpec, tls::Version,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::*;

const LARGEST: usize = 16 * 1024;

fn spec(authority: &Authority, account: &str, accepts: &str) -> TlsSpec {
    let id = |account| SpiffeId::new("cluster.local", "default", account);
    let request = KeyAndCsr::generate(Some(&id(account))).unwrap();
    let signed = authority.sign(&request.csr_pem, &id(account), Duration::from_hours(1)).unwrap();
    let identity = request.finish(signed.pem().as_bytes()).unwrap();
    let names = vec![NameMatch::uri(id(accepts).to_string())];
    TlsSpec {
        identities: vec![Live::new(identity)],
        peer: Some(PeerCheck::spiffe(Live::new(authority.roots().unwrap()), names)),
        ..TlsSpec::default()
    }
}

/// Returns the TLS settings of a server and a client in one mesh.
fn specs(newest: Option<Version>) -> (TlsSpec, TlsSpec) {
    let authority = Authority::ephemeral().unwrap();
    let (server, client) = (spec(&authority, "server", "client"), spec(&authority, "client", "server"));
    (server, TlsSpec { max_version: newest, ..client })
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (far, _) = listener.accept().await.unwrap();
    for tcp in [&near, &far] {
        tcp.set_nodelay(true).unwrap();
    }
    (near, far)
}

fn name() -> ServerName<'static> {
    "server.test".try_into().unwrap()
}

/// This side of a connection.
struct End {
    tcp: TcpStream,
    session: TlsSession,
    input: Buffer,
    output: Buffer,
}

impl End {
    fn new(tcp: TcpStream, side: TlsConnection) -> Self {
        let session = TlsSession::new(side, Buffer::default());
        Self { tcp, session, input: Buffer::default(), output: Buffer::default() }
    }

    async fn handshake(&mut self) -> io::Result<()> {
        poll_fn(|cx| self.session.poll_handshake(&self.tcp, cx, &mut self.input)).await
    }

    async fn read(&mut self) -> io::Result<usize> {
        poll_fn(|cx| self.session.poll_read(&self.tcp, cx, &mut self.input)).await
    }

    async fn flush(&mut self) -> io::Result<()> {
        poll_fn(|cx| self.session.poll_flush(&self.tcp, cx, &mut self.output)).await
    }

    async fn write(&mut self, content: &[u8]) {
        self.output.extend(content);
        self.flush().await.unwrap();
    }

    /// Reads this number of content bytes.
    async fn take(&mut self, count: usize) -> Vec<u8> {
        while self.input.len() < count {
            assert!(self.read().await.unwrap() > 0);
        }
        let taken = self.input.bytes()[..count].to_vec();
        self.input.consume(count);
        taken
    }

    /// Echoes content until the peer ends the session.
    async fn echo(mut self) -> io::Result<()> {
        while self.read().await? > 0 {
            std::mem::swap(&mut self.input, &mut self.output);
            self.flush().await?;
        }
        poll_fn(|cx| self.session.poll_close(&self.tcp, cx)).await
    }
}

/// Returns a server session, and a client after its handshake.
async fn served(newest: Option<Version>) -> (End, client::TlsStream<TcpStream>) {
    let (server, client) = specs(newest);
    let (near, far) = sockets().await;
    let acceptor = Acceptor::new(&server).unwrap();
    let mut ours = End::new(far, TlsConnection::Server(acceptor.accept(&[]).unwrap()));
    let connector = TlsConnector::from(client.client().unwrap());
    let (shaken, theirs) = tokio::join!(ours.handshake(), connector.connect(name(), near));
    shaken.unwrap();
    (ours, theirs.unwrap())
}

/// Returns a client session, and a server that completes its handshake when the client reads or writes.
async fn connected() -> (End, impl Future<Output = io::Result<server::TlsStream<TcpStream>>>) {
    let (server, client) = specs(None);
    let (near, far) = sockets().await;
    let acceptor = TlsAcceptor::from(server.server().unwrap());
    let accepted = tokio::spawn(async move { acceptor.accept(far).await });
    let connector = Connector::new(&client).unwrap();
    let address = near.peer_addr().unwrap();
    let mut ours = End::new(near, TlsConnection::Client(connector.connect(name(), address).unwrap()));
    ours.handshake().await.unwrap();
    (ours, async { accepted.await.unwrap() })
}

/// Returns a client's records for these pieces of content.
fn records(client: &mut ClientConnection, pieces: &[&[u8]]) -> Vec<u8> {
    let mut records = Vec::new();
    for piece in pieces {
        client.writer().write_all(piece).unwrap();
        while client.wants_write() {
            client.write_tls(&mut records).unwrap();
        }
    }
    records
}

/// Returns bytes that identify their position.
fn content(count: usize) -> Vec<u8> {
    (0_u32..).flat_map(|number| number.to_le_bytes()).take(count).collect()
}

#[tokio::test]
async fn large_content_passes_both_ways_in_both_versions() {
    for version in [Version::Tls12, Version::Tls13] {
        let (ours, theirs) = served(Some(version)).await;
        let (mut reader, mut writer) = tokio::io::split(theirs);
        let sent = content(1_000_003);
        let send = async {
            writer.write_all(&sent).await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let mut returned = Vec::new();
        let (echoed, _, read) = tokio::join!(ours.echo(), send, reader.read_to_end(&mut returned));
        echoed.unwrap();
        read.unwrap();
        assert!(returned == sent, "{version:?}");
    }
}

#[tokio::test]
async fn records_of_any_size_arrive_in_any_pieces() {
    let (mut ours, mut theirs) = served(None).await;
    let (tcp, client) = theirs.get_mut();
    // A record of maximum size exceeds a block.
    let large = content(LARGEST);
    tcp.write_all(&records(client, &[&large])).await.unwrap();
    assert!(ours.take(LARGEST).await == large);
    // Many records at once.
    let (small, many) = (content(40), content(40_000));
    let pieces: Vec<_> = many.chunks(40).collect();
    tcp.write_all(&records(client, &pieces)).await.unwrap();
    assert!(ours.take(many.len()).await == many);
    // A record that is split at every position.
    let length = records(client, &[&small]).len();
    let (mut ours, mut theirs) = served(None).await;
    let (tcp, client) = theirs.get_mut();
    for cut in 1..length {
        let record = records(client, &[&small]);
        tcp.write_all(&record[..cut]).await.unwrap();
        poll_fn(|cx| {
            assert!(ours.session.poll_read(&ours.tcp, cx, &mut ours.input).is_pending());
            if ours.session.raw.len() < cut { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        // Unprocessed input survives `rest`.
        ours.session.rest();
        tcp.write_all(&record[cut..]).await.unwrap();
        assert_eq!(ours.take(small.len()).await, small, "cut at {cut}");
    }
}

#[tokio::test]
async fn a_read_is_limited_by_the_space_in_the_buffer() {
    let (mut ours, mut theirs) = served(None).await;
    let (tcp, client) = theirs.get_mut();
    let all = content(4 * LARGEST);
    let pieces: Vec<_> = all.chunks(LARGEST / 4).collect();
    let sending = records(client, &pieces);
    tcp.write_all(&sending).await.unwrap();
    tcp.shutdown().await.unwrap();
    let mut read = Vec::new();
    while read.len() < all.len() {
        ours.read().await.unwrap();
        assert!(ours.input.len() <= LARGEST, "{}", ours.input.len());
        // Output is written in between.
        ours.write(b"so far").await;
        read.extend_from_slice(ours.input.bytes());
        ours.input.clear();
    }
    assert!(read == all);
}

#[tokio::test]
async fn keys_are_updated_at_the_request_of_the_peer() {
    let (mut ours, mut theirs) = served(None).await;
    for round in 0..3_u8 {
        let (tcp, client) = theirs.get_mut();
        client.refresh_traffic_keys().unwrap();
        tcp.write_all(&records(client, &[&[round; 9]])).await.unwrap();
        assert_eq!(ours.take(9).await, [round; 9]);
        ours.write(&[round; 5]).await;
        let mut answer = [0; 5];
        theirs.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, [round; 5]);
    }
}

#[tokio::test]
async fn an_end_without_close_notify_is_an_error() {
    let (mut ours, mut theirs) = served(None).await;
    let (tcp, client) = theirs.get_mut();
    let mut last = records(client, &[b"the ", b"last"]);
    client.send_close_notify();
    client.write_tls(&mut last).unwrap();
    last.extend_from_slice(b"and what does not count");
    tcp.write_all(&last).await.unwrap();
    assert_eq!(ours.take(8).await, b"the last");
    assert_eq!(ours.read().await.unwrap(), 0);
    // The other direction is still open.
    ours.write(b"bye").await;
    let mut answer = [0; 3];
    theirs.read_exact(&mut answer).await.unwrap();
    poll_fn(|cx| ours.session.poll_close(&ours.tcp, cx)).await.unwrap();
    assert_eq!(theirs.read(&mut answer).await.unwrap(), 0);

    let (mut ours, mut theirs) = served(None).await;
    let (tcp, client) = theirs.get_mut();
    let cut = records(client, &[b"not the last", b"lost"]);
    tcp.write_all(&cut[..cut.len() - 1]).await.unwrap();
    tcp.shutdown().await.unwrap();
    assert_eq!(ours.take(12).await, b"not the last");
    for _ in 0..2 {
        assert_eq!(ours.read().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

#[tokio::test]
async fn invalid_tls_is_answered_with_an_alert() {
    let (server, _) = specs(None);
    let acceptor = Acceptor::new(&server).unwrap();
    let (mut near, far) = sockets().await;
    near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut ours = End::new(far, TlsConnection::Server(acceptor.accept(&[]).unwrap()));
    assert_eq!(ours.handshake().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    let mut alert = [0; 7];
    near.read_exact(&mut alert).await.unwrap();
    assert_eq!((alert[0], alert[5]), (21, 2), "{alert:?}");

    for spoiled in [0, 4, 20] {
        let (mut ours, mut theirs) = served(None).await;
        let (tcp, client) = theirs.get_mut();
        let mut record = records(client, &[b"spoiled on the way"]);
        record[spoiled] ^= 0x40;
        tcp.write_all(&record).await.unwrap();
        tcp.shutdown().await.unwrap();
        let error = ours.read().await.unwrap_err();
        if spoiled != 4 {
            // With another length, the record is only incomplete.
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            let alert = theirs.read(&mut [0; 9]).await.unwrap_err();
            assert!(alert.to_string().contains("fatal alert"), "{alert}");
        }
        assert!(ours.read().await.is_err());
    }
}

#[tokio::test]
async fn the_memory_of_a_handshake_is_limited() {
    let (server, _) = specs(None);
    let acceptor = Acceptor::new(&server).unwrap();
    let (mut near, far) = sockets().await;
    let mut ours = End::new(far, TlsConnection::Server(acceptor.accept(&[]).unwrap()));
    let flood = async {
        // A client hello of 65,535 bytes, which continues.
        let mut record = vec![0; 5 + LARGEST];
        record[..9].copy_from_slice(&[22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff]);
        while near.write_all(&record).await.is_ok() {}
    };
    tokio::select! {
        shaken = ours.handshake() => assert!(shaken.is_err()),
        () = flood => panic!("the flood should not have ended first"),
    }
    assert!(ours.session.raw.len() <= LARGE);
}

#[tokio::test]
async fn a_client_completes_its_handshake_before_it_sends() {
    let (mut ours, accepted) = connected().await;
    let serving = async {
        let mut server = accepted.await.unwrap();
        server.write_all(b"hello").await.unwrap();
        server.flush().await.unwrap();
        server
    };
    let (greeting, mut server) = tokio::join!(ours.take(5), serving);
    assert_eq!(greeting, b"hello");
    ours.write(b"you").await;
    let mut received = [0; 3];
    server.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"you");
}

#[tokio::test]
async fn the_first_data_is_sent_with_the_end_of_the_handshake() {
    let (mut ours, accepted) = connected().await;
    assert!(!ours.session.sealed.is_empty());
    ours.write(b"a request").await;
    let mut server = accepted.await.unwrap();
    let mut received = [0; 9];
    server.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"a request");

    let (mut ours, mut theirs) = served(None).await;
    assert!(!ours.session.sealed.is_empty(), "there is no ticket");
    ours.write(b"an answer").await;
    let mut received = [0; 9];
    theirs.read_exact(&mut received).await.unwrap();
    assert_eq!(theirs.get_ref().1.tls13_tickets_received(), 1);
}

#[tokio::test]
async fn an_idle_session_holds_no_block() {
    let (mut ours, mut theirs) = served(None).await;
    // The ticket waits for the first data, in minimal memory.
    ours.session.rest();
    assert!(ours.session.sealed.room() == 0 && !ours.session.raw.has_memory());
    theirs.write_all(b"a request").await.unwrap();
    theirs.flush().await.unwrap();
    ours.take(9).await;
    ours.write(b"an answer").await;
    assert!(
        poll_fn(|cx| Poll::Ready(ours.session.poll_read(&ours.tcp, cx, &mut ours.input))).await.is_pending()
    );
    ours.session.rest();
    assert!(!ours.session.sealed.has_memory() && !ours.session.raw.has_memory());
    let mut answer = [0; 9];
    theirs.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"an answer");
}
