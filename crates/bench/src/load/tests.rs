use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    sync::Arc,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};
use rustls::{
    RootCertStore, ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};

use super::*;
use crate::{certificates::Certificates, clock, serve};

fn load(target: SocketAddr) -> Load {
    Load {
        target,
        traffic: Traffic::Http1,
        connections: 3,
        schedule: Some(Schedule::per_second(500)),
        payload: 1024,
        warmup: Duration::from_millis(100),
        window: Duration::from_millis(400),
        tls: None,
    }
}

#[test]
fn the_timer_ticks_repeatedly() {
    let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
    let timer = requests::ticks(&epoll, clock::now(), Schedule::per_second(1_000)).unwrap();
    for _ in 0..3 {
        let mut events = [EpollEvent::empty(); 2];
        assert_eq!(epoll.wait(&mut events, EpollTimeout::from(10_000_u16)), Ok(1));
        assert_eq!(events[0].data(), requests::TIMER);
        timer.wait().unwrap();
    }
}

#[test]
fn every_request_of_the_window_is_accounted_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::spawn(move || skysail_load::server::serve_http1(&listener).unwrap());
    let mut moments = Vec::new();
    let outcome = drive(&load(target), |boundary| moments.push(boundary)).unwrap();
    assert_eq!(moments, [WindowBoundary::Begin, WindowBoundary::End]);
    assert_eq!((outcome.requests, outcome.unanswered, outcome.refused), (200, 0, 0));
    assert_eq!(outcome.due.len(), 200);
    assert_eq!(outcome.late.len(), 200);
    // A request is never sent before it is due.
    assert!(outcome.due.max() >= outcome.sent.min());
    assert!(outcome.due.mean() >= outcome.sent.mean());
}

#[test]
fn waiting_requests_count_from_their_due_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    let (outcome, begun) = std::thread::scope(|scope| {
        let (sender, begun) = std::sync::mpsc::sync_channel(2);
        let driving = scope.spawn(move || {
            let stalled = Load { connections: 1, warmup: Duration::ZERO, ..load(target) };
            drive(&stalled, |boundary| sender.send(boundary).unwrap())
        });
        // No request is answered before the end of the window.
        let moments = [begun.recv().unwrap(), begun.recv().unwrap()];
        std::thread::spawn(move || skysail_load::server::serve_http1(&listener).unwrap());
        (driving.join().unwrap().unwrap(), moments)
    });
    assert_eq!(begun, [WindowBoundary::Begin, WindowBoundary::End]);
    assert_eq!((outcome.requests, outcome.unanswered, outcome.answered_in_window), (200, 0, 0));
    // The first request was due 400 ms before the end; all others were sent after the end.
    assert!(outcome.due.max() >= 390_000_000, "{}", outcome.due.max());
    assert!(outcome.due.value_at_quantile(0.5) >= 190_000_000);
    assert!(outcome.sent.value_at_quantile(0.5) < outcome.due.value_at_quantile(0.5));
}

#[test]
fn responses_other_than_200_have_no_latency() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
    });
    let one = Load { connections: 1, ..load(target) };
    let outcome = drive(&one, |_| ()).unwrap();
    assert_eq!(outcome.due.len(), 0);
    assert_eq!(outcome.refused + outcome.unanswered, 200);
    assert!(outcome.refused > 0);
}

/// Starts the server of a protocol on its own thread.
fn server(protocol: Protocol) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::spawn(move || serve::run_on(protocol, listener).unwrap());
    target
}

#[test]
fn without_a_schedule_each_response_triggers_the_next_request() {
    let closed = Load { schedule: None, ..load(server(Protocol::Http1)) };
    let mut moments = Vec::new();
    let outcome = drive(&closed, |boundary| moments.push(boundary)).unwrap();
    assert_eq!(moments, [WindowBoundary::Begin, WindowBoundary::End]);
    assert_eq!((outcome.unanswered, outcome.refused), (0, 0));
    assert!(outcome.requests > 3, "{}", outcome.requests);
    assert_eq!((outcome.due.len(), outcome.answered_in_window), (outcome.requests, outcome.requests));
}

#[test]
fn every_protocol_can_be_sent_at_a_rate() {
    for protocol in [LoadProtocol::Http1, LoadProtocol::Http2, LoadProtocol::Grpc, LoadProtocol::Tcp] {
        let traffic = Traffic::Scheduled(protocol);
        let target = server(traffic.protocol());
        let mut moments = Vec::new();
        let outcome = drive(&Load { traffic, ..load(target) }, |boundary| moments.push(boundary)).unwrap();
        assert_eq!(moments, [WindowBoundary::Begin, WindowBoundary::End], "{protocol:?}");
        assert_eq!((outcome.unanswered, outcome.refused), (0, 0), "{protocol:?}");
        // 400 ms of 500 requests/s; up to one more is due at each boundary.
        assert!((199..=201).contains(&outcome.requests), "{protocol:?}: {}", outcome.requests);
        assert_eq!(outcome.due.len(), outcome.requests, "{protocol:?}");
        assert!(outcome.answered >= 248, "with those of the warm-up: {}", outcome.answered);
        assert!(outcome.answered_in_window > 0 && outcome.answered_in_window <= outcome.answered);
        assert!(outcome.due.max() >= outcome.sent.min(), "{protocol:?}");
    }
}

#[test]
fn scheduled_requests_without_success_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // The first request, before the load, succeeds.
            for status in [200].into_iter().chain(std::iter::repeat(503)) {
                let mut filled = 0;
                while filled < 1_024 {
                    match stream.read(&mut [0; 4_096]) {
                        Ok(0) | Err(_) => return,
                        Ok(length) => filled += length,
                    }
                }
                let _ = write!(stream, "HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n");
            }
        }
    });
    let traffic = Traffic::Scheduled(LoadProtocol::Http1);
    let outcome = drive(&Load { connections: 1, traffic, ..load(target) }, |_| ()).unwrap();
    assert_eq!((outcome.due.len(), outcome.answered), (0, 0));
    assert_eq!(outcome.refused + outcome.unanswered, outcome.requests);
    assert!(outcome.refused > 0);
}

#[test]
fn http2_streams_are_always_busy() {
    let traffic = Traffic::Http2 { streams: 4 };
    let outcome = drive(&Load { schedule: None, traffic, ..load(server(Protocol::Http2)) }, |_| ()).unwrap();
    assert_eq!((outcome.unanswered, outcome.refused), (0, 0));
    assert!(outcome.requests > 12, "{}", outcome.requests);
    assert_eq!(outcome.due.len(), outcome.requests);
}

#[test]
fn bytes_are_counted_in_millions() {
    let traffic = Traffic::Bytes;
    let outcome = drive(&Load { schedule: None, traffic, ..load(server(Protocol::Tcp)) }, |_| ()).unwrap();
    assert!(outcome.answered_in_window > 1, "{}", outcome.answered_in_window);
}

#[test]
fn idle_connections_stay_open_until_dropped() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut idle = Idle::new(listener.local_addr().unwrap(), None);
    let accepting = std::thread::spawn(move || {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        let accept = |_| {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 1_024]).unwrap() > 0);
            stream.write_all(answer).unwrap();
            stream
        };
        (0..5).map(accept).collect::<Vec<_>>()
    });
    idle.grow(3).unwrap();
    idle.grow(5).unwrap();
    let mut streams = accepting.join().unwrap();
    drop(idle);
    assert!(streams.iter_mut().all(|stream| stream.read(&mut [0; 8]).unwrap() == 0));
}

/// Requires a client certificate, answers one request per connection, and issues session tickets.
fn tls_server(certificates: &Certificates) -> SocketAddr {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&certificates.root).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build().unwrap();
    let own = &certificates.server;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            vec![CertificateDer::from_pem_file(&own.certificate).unwrap()],
            PrivateKeyDer::from_pem_file(&own.key).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let connection = ServerConnection::new(config.clone()).unwrap();
            let mut stream = StreamOwned::new(connection, stream.unwrap());
            std::thread::spawn(move || {
                let mut input = vec![0; 4_096];
                let mut filled = 0;
                while !input[..filled].ends_with(b"xxx") {
                    match stream.read(&mut input[filled..]) {
                        // At the end, the client closes without notice.
                        Ok(0) | Err(_) => return,
                        Ok(length) => filled += length,
                    }
                }
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                let _ = stream.read(&mut [0; 8]);
            });
        }
    });
    target
}

#[test]
fn new_connections_resume_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let certificates = Certificates::make(folder.path()).unwrap();
    let target = tls_server(&certificates);
    for resume in [false, true] {
        let traffic = Traffic::NewConnections { resume };
        let tls = Some(crate::tls::mesh(&certificates, b"http/1.1", resume).unwrap());
        let outcome = drive(&Load { schedule: None, traffic, tls, ..load(target) }, |_| ()).unwrap();
        assert_eq!((outcome.unanswered, outcome.refused), (0, 0));
        assert!(outcome.requests > 3, "{}", outcome.requests);
        assert_eq!(outcome.resumed > 0, resume, "{} of {}", outcome.resumed, outcome.requests);
    }
}

#[test]
fn surge_requests_all_end_and_connections_are_limited() {
    let phase = Duration::from_millis(200);
    let surge = |target| surge::Surge {
        target,
        payload: 1_024,
        connections: 4,
        phases: [(500, phase), (5_000, phase), (500, phase)],
    };
    let echo = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let [to_echo, to_silent] = [&echo, &silent].map(|listener| listener.local_addr().unwrap());
    // The request is too long, so the server answers with an error and closes.
    let large = surge::Surge { payload: 2 << 20, ..surge(to_echo) };
    std::thread::spawn(move || skysail_load::server::serve_http1(&echo).unwrap());
    let account = surge::drive(&surge(to_echo)).unwrap();
    assert_eq!((account.requests.len(), account.connections <= 4), (1_200, true));
    assert!(account.requests.iter().any(|request| request.end == surge::End::Answered));
    let account = surge::drive(&large).unwrap();
    assert!(account.requests.iter().all(|request| request.end != surge::End::Answered));
    let account = surge::drive(&surge(to_silent)).unwrap();
    assert_eq!(account.requests.len(), 1_200);
    assert!(account.requests.iter().all(|request| request.end == surge::End::Failed));
}
