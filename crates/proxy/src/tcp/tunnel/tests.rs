use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;

/// Two ends of a TCP connection.
async fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (near, listener.accept().await.unwrap().0)
}

fn noise(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(3).fill(&mut bytes);
    bytes
}

/// Sends the bytes from one end and reads them at the other.
async fn pass(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    let mut got = vec![0; bytes.len()];
    let (sent, read) = tokio::join!(from.write_all(bytes), to.read_exact(&mut got));
    sent.unwrap();
    read.unwrap();
    assert!(got == bytes);
}

#[tokio::test]
async fn large_transfers_use_a_pipe_and_small_ones_buffers() {
    let (mut client, near) = connected().await;
    let (far, mut server) = connected().await;
    let (mut near, mut far) = (Stream::new(near), Stream::new(far));
    let (mut tunnel, mut timer) = (Tunnel::default(), Timer::default());
    let much = noise(5_000_000);
    // Runs the tunnel until the future of the peers completes.
    macro_rules! meanwhile {
        ($peers:expr) => {
            tokio::select! {
                ended = tunnel.run(&mut near, &mut far, &mut timer, None, None, || None) => panic!("{ended:?}"),
                () = $peers => {}
            }
        };
    }
    meanwhile!(pass(&mut client, &mut server, b"hello"));
    assert_eq!(tunnel.up.passage, TransferMode::Buffers);
    // The bytes that fill the input buffer are copied; further bytes in the socket are spliced.
    client.write_all(&much[..100_000]).await.unwrap();
    meanwhile!(async {
        server.read_exact(&mut vec![0; 100_000]).await.unwrap();
    });
    meanwhile!(pass(&mut client, &mut server, &much));
    meanwhile!(async {
        pass(&mut client, &mut server, &much).await;
        pass(&mut server, &mut client, &much).await;
    });
    meanwhile!(pass(&mut client, &mut server, b"bye"));
    assert!(tunnel.up.pipe.is_none() && tunnel.down.pipe.is_none(), "an idle connection holds a pipe");
    let up = 5 + 100_000 + 2 * 5_000_000 + 3;
    assert_eq!((near.received, far.sent, far.received, near.sent), (up, up, 5_000_000, 5_000_000));
    assert!(!near.input.has_memory() && !far.output.has_memory());

    // One direction still forwards after the other has ended.
    client.shutdown().await.unwrap();
    meanwhile!(async {
        assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
        pass(&mut server, &mut client, &much).await;
    });
    drop(server);
    let ended = tunnel.run(&mut near, &mut far, &mut timer, None, None, || None).await;
    assert_eq!(ended, Ended::Closed);
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn a_receiver_that_closes_ends_its_direction_and_frees_its_buffers() {
    let (mut client, near) = connected().await;
    let (far, server) = connected().await;
    let (mut near, mut far) = (Stream::new(near), Stream::new(far));
    let (mut tunnel, mut timer) = (Tunnel::default(), Timer::default());
    // The receiver reads nothing, so the pipe fills up; then the receiver closes with unread bytes.
    let much = noise(20_000_000);
    let sender = tokio::spawn(async move { client.write_all(&much).await });
    tokio::select! {
        ended = tunnel.run(&mut near, &mut far, &mut timer, None, None, || None) => panic!("{ended:?}"),
        () = async {
            while server.peek(&mut [0; 65_536]).await.unwrap() < 65_536 {}
        } => {}
    }
    drop(server);
    let ended = tunnel.run(&mut near, &mut far, &mut timer, None, None, || None).await;
    assert_eq!(ended, Ended::Closed);
    drop((near, far, tunnel));
    assert!(sender.await.unwrap().is_err());
}
