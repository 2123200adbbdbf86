use std::task::{Poll, Waker};

use super::*;
use crate::http2::frame::{END_HEADERS, END_STREAM, FrameKind, Head};

mod limits;

const LIMITS: SessionLimits =
    SessionLimits { head: Bounds { size: 4096, fields: 20 }, options: Http2Options::new(10) };
const CONNECTION_WINDOW: u32 = LIMITS.options.connection_window;

fn feed(session: &mut Session, bytes: &[u8]) -> Result<(), Reason> {
    // In pieces, as input may arrive.
    let mut input = Buffer::default();
    for piece in bytes.chunks(977) {
        input.extend(piece);
        session.feed(&mut input)?;
    }
    Ok(())
}

fn server() -> Session {
    let mut session = Session::new(Role::Server, LIMITS);
    let mut begin = Buffer::default();
    begin.extend(frame::PREFACE);
    frame::settings(&mut begin, &[]);
    feed(&mut session, begin.bytes()).unwrap();
    session.out.clear();
    session
}

fn client() -> Session {
    let mut session = Session::new(Role::Client, LIMITS);
    feed(&mut session, &frame(FrameKind::Settings, 0, 0, b"")).unwrap();
    session.out.clear();
    session
}

fn frame(kind: FrameKind, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Buffer::default();
    frame::head(&mut out, kind, flags, stream, payload.len());
    out.extend(payload);
    out.bytes().to_vec()
}

/// `GET http://a/` without table entries.
const GET: &[u8] = b"\x82\x86\x84\x01\x01a";

fn get(stream: u32) -> Vec<u8> {
    frame(FrameKind::Headers, END_HEADERS | END_STREAM, stream, GET)
}

fn post(stream: u32) -> Vec<u8> {
    frame(FrameKind::Headers, END_HEADERS, stream, b"\x83\x86\x84\x01\x01a")
}

/// Takes the output.
fn frames(session: &mut Session) -> Vec<(FrameKind, u32, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some(head) = Head::read(session.out.bytes()) {
        let payload = session.out.bytes()[frame::HEAD..frame::HEAD + head.length].to_vec();
        session.out.consume(frame::HEAD + head.length);
        frames.push((head.kind, head.stream, payload));
    }
    session.written();
    frames
}

fn resets(session: &mut Session) -> Vec<(u32, Reason)> {
    let reason = |payload: &[u8]| Reason(frame::number(payload).unwrap());
    let frames = frames(session).into_iter().filter(|(kind, ..)| *kind == FrameKind::Reset);
    frames.map(|(_, stream, payload)| (stream, reason(&payload))).collect()
}

fn cx() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn request() -> RequestHead {
    RequestHead::build("POST", "/x", "a:1", &[("x-one", "1"), ("connection", "close")])
}

/// Passes the output of each to the other until there is none.
fn talk(a: &mut Session, b: &mut Session) {
    while !a.out.is_empty() || !b.out.is_empty() {
        let mut sent = std::mem::take(&mut a.out);
        feed(b, sent.bytes()).unwrap();
        a.written();
        sent = std::mem::take(&mut b.out);
        feed(a, sent.bytes()).unwrap();
        b.written();
    }
}

#[test]
fn a_client_and_a_server_exchange_messages() {
    let (mut client, mut server) = (Session::new(Role::Client, LIMITS), Session::new(Role::Server, LIMITS));
    talk(&mut client, &mut server);
    assert!(client.is_settled() && client.capacity() == 10);
    for _ in 0..3 {
        let id = client.request(&request(), false, false).unwrap().unwrap();
        assert_eq!(client.poll_room(&cx(), id, 5), Poll::Ready(Some(5)));
        assert!(client.send(id, b"hello", false));
        let mut trailers = Headers::default();
        trailers.append("x-sum", b"5");
        assert!(client.send_trailers(id, &trailers) && !client.send(id, b"more", true));
        talk(&mut client, &mut server);

        let request = server.accept().unwrap();
        assert_eq!((request.head.method(), request.head.path(), request.end), ("POST", "/x", false));
        assert!(request.head.has("x-one") && !request.head.has("connection"));
        assert!(!server.is_end(id));
        assert!(matches!(server.poll_piece(&cx(), id), Poll::Ready(Ok(Some(piece))) if piece == "hello"));
        assert!(matches!(server.poll_piece(&cx(), id), Poll::Ready(Ok(None))));
        assert!(server.trailers(id).unwrap().has("x-sum") && server.is_end(id));
        server.release(id, 5);
        assert!(server.respond(id, &ResponseHead::build(103, &[]), true, false));
        assert!(server.respond(id, &ResponseHead::build(201, &[("x-two", "2")]), false, true));
        server.forget(id);
        talk(&mut client, &mut server);

        let mut head = ResponseHead::default();
        assert!(matches!(client.poll_answer(&cx(), id, &mut head), Poll::Ready(Ok(None))));
        assert_eq!(head.status(), 103);
        assert!(matches!(client.poll_answer(&cx(), id, &mut head), Poll::Ready(Ok(Some(None)))));
        assert!(head.status() == 201 && head.has("x-two") && client.is_end(id));
        client.forget(id);
        assert!(!client.is_busy() && !server.is_busy() && client.out.is_empty());
    }
}

#[test]
fn content_is_sent_within_the_windows() {
    let (mut client, mut server) = (client(), server());
    let id = client.request(&request(), false, false).unwrap().unwrap();
    let Poll::Ready(Some(room)) = client.poll_room(&cx(), id, 1 << 20) else { panic!("no room") };
    assert_eq!(room, FIRST_WINDOW as usize);
    assert!(client.send(id, &vec![0; room], false));
    assert!(client.poll_room(&cx(), id, 1).is_pending());
    talk(&mut client, &mut server);
    // The stream's window is that of the server's settings, the connection's that of its window update.
    frame::window_update(&mut server.out, 0, 10);
    talk(&mut client, &mut server);
    assert!(client.poll_room(&cx(), id, 100).is_pending());
    frame::window_update(&mut server.out, id, 7);
    talk(&mut client, &mut server);
    assert_eq!(client.poll_room(&cx(), id, 100), Poll::Ready(Some(7)));
    frame::settings(&mut server.out, &[(4, 65_535 + 1)]);
    talk(&mut client, &mut server);
    assert_eq!(client.poll_room(&cx(), id, 100), Poll::Ready(Some(8)));
    // Content that is passed on reopens the windows in large steps. Discarded content reopens that of the connection.
    let request = server.accept().unwrap();
    server.release(request.stream, 1 << 30);
    assert_eq!(frames(&mut server).len(), 0);
    for _ in 0..16 {
        let mut data = frame(FrameKind::Data, 0, id, &[0; 16 * 1024]);
        data.truncate(frame::HEAD + 16 * 1024);
        let _ = feed(&mut server, &data);
        server.release(id, 16 * 1024);
    }
    let updates: Vec<_> = frames(&mut server).into_iter().map(|(kind, stream, _)| (kind, stream)).collect();
    assert!(updates.contains(&(FrameKind::WindowUpdate, id)), "{updates:?}");
    assert!(updates.len() < 6, "{updates:?}");
}

#[test]
fn malformed_requests_end_only_their_streams() {
    let mut server = server();
    let bad: [(&[u8], Reason); 3] = [
        (b"\x82\x86\x84\x01\x01a\x00\x01X\x01a", Reason::PROTOCOL),
        (b"\x82\x86\x01\x01a", Reason::PROTOCOL),
        (b"\x82\x86\x84\x01\x01a\x00\x0econtent-length\x011", Reason::PROTOCOL),
    ];
    for (at, (block, reason)) in bad.into_iter().enumerate() {
        let id = at as u32 * 2 + 1;
        feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, id, block)).unwrap();
        assert_eq!(resets(&mut server), [(id, reason)]);
    }
    // More and less content than declared.
    for (id, content) in [(11, &b"abc"[..]), (13, b"a")] {
        let block = b"\x83\x86\x84\x01\x01a\x00\x0econtent-length\x012";
        feed(&mut server, &frame(FrameKind::Headers, END_HEADERS, id, block)).unwrap();
        feed(&mut server, &frame(FrameKind::Data, END_STREAM, id, content)).unwrap();
        assert_eq!(resets(&mut server), [(id, Reason::PROTOCOL)]);
    }
    // Trailers without the end of the stream, and content after the end.
    feed(&mut server, &[post(15), post(17)].concat()).unwrap();
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS, 15, b"")).unwrap();
    feed(&mut server, &frame(FrameKind::Data, END_STREAM, 17, b"")).unwrap();
    feed(&mut server, &frame(FrameKind::Data, END_STREAM, 17, b"")).unwrap();
    assert_eq!(resets(&mut server), [(15, Reason::PROTOCOL), (17, Reason::STREAM_CLOSED)]);
    feed(&mut server, &get(19)).unwrap();
    assert!(std::iter::from_fn(|| server.accept()).any(|request| request.stream == 19));
    assert_eq!(server.streams.len(), 1, "those given up before anybody took them are gone");
}

#[test]
fn protocol_violations_end_the_connection() {
    let update = |stream, count: u32| frame(FrameKind::WindowUpdate, 0, stream, &count.to_be_bytes());
    let setting = |id: u16, value: u32| {
        let payload = [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
        frame(FrameKind::Settings, 0, 0, &payload)
    };
    let bad = [
        (frame(FrameKind::Data, 0, 0, b""), Reason::PROTOCOL),
        (frame(FrameKind::Data, 0, 1, b""), Reason::PROTOCOL),
        (get(2), Reason::PROTOCOL),
        (frame(FrameKind::Headers, END_HEADERS, 1, b"\xff\xff\xff"), Reason::COMPRESSION),
        (frame(FrameKind::Continuation, END_HEADERS, 1, b""), Reason::PROTOCOL),
        ([frame(FrameKind::Headers, 0, 1, GET), get(3)].concat(), Reason::PROTOCOL),
        (
            [frame(FrameKind::Headers, 0, 1, GET), frame(FrameKind::Continuation, 4, 3, b"")].concat(),
            Reason::PROTOCOL,
        ),
        (frame(FrameKind::PushPromise, 0, 1, b""), Reason::PROTOCOL),
        (frame(FrameKind::Reset, 0, 1, &[0; 4]), Reason::PROTOCOL),
        (frame(FrameKind::Ping, 0, 0, b"short"), Reason::FRAME_SIZE),
        (frame(FrameKind::Ping, 0, 1, &[0; 8]), Reason::PROTOCOL),
        (frame(FrameKind::Settings, 0, 0, b"odd"), Reason::FRAME_SIZE),
        (frame(FrameKind::Settings, 0, 1, b""), Reason::PROTOCOL),
        (frame(FrameKind::GoAway, 0, 0, b""), Reason::FRAME_SIZE),
        (frame(FrameKind::Unknown, 0, 0, &[0; 16 * 1024 + 1]), Reason::FRAME_SIZE),
        (update(0, 0), Reason::PROTOCOL),
        (update(0, 0x7fff_ffff), Reason::FLOW_CONTROL),
        (setting(4, 1 << 31), Reason::FLOW_CONTROL),
        (setting(5, 100), Reason::PROTOCOL),
        (setting(2, 2), Reason::PROTOCOL),
        ([get(1), get(1), get(2)].concat(), Reason::PROTOCOL),
    ];
    for (bytes, reason) in bad {
        assert_eq!(feed(&mut server(), &bytes), Err(reason), "{bytes:?}");
    }
    let mut server = Session::new(Role::Server, LIMITS);
    assert_eq!(feed(&mut server, b"GET / HTTP/1.1\r\n"), Err(Reason::PROTOCOL));
    // More than the window.
    let mut server = self::server();
    feed(&mut server, &post(1)).unwrap();
    let data = frame(FrameKind::Data, 0, 1, &[0; 16 * 1024]);
    let sixteen = data.repeat(16);
    feed(&mut server, &sixteen).unwrap();
    feed(&mut server, &data).unwrap();
    assert_eq!(resets(&mut server), [(1, Reason::FLOW_CONTROL)]);
}

#[test]
fn frames_on_streams_that_the_peer_ended_are_errors() {
    let data = |stream| frame(FrameKind::Data, 0, stream, b"late");
    let trailers = |stream| frame(FrameKind::Headers, END_HEADERS | END_STREAM, stream, b"");
    let reset = |stream| frame(FrameKind::Reset, 0, stream, &8_u32.to_be_bytes());
    let answered = |begin: &[u8]| {
        let mut server = server();
        feed(&mut server, begin).unwrap();
        while let Some(request) = server.accept() {
            server.respond(request.stream, &ResponseHead::build(200, &[]), false, true);
            server.forget(request.stream);
        }
        frames(&mut server);
        server
    };
    for late in [data(5), trailers(5)] {
        // Ended by the peer; or never opened, because a later stream was.
        for begin in [get(5), get(7)] {
            assert_eq!(feed(&mut answered(&begin), &late), Err(Reason::STREAM_CLOSED), "{begin:?}");
        }
        // Reset: this affects only the stream. The same while the stream is still in use here.
        let mut after_reset = answered(&[post(5), reset(5)].concat());
        let mut busy = server();
        feed(&mut busy, &post(5)).unwrap();
        busy.accept().unwrap();
        feed(&mut busy, &reset(5)).unwrap();
        frames(&mut busy);
        for server in [&mut after_reset, &mut busy] {
            feed(server, &[late.clone(), get(7)].concat()).unwrap();
            assert_eq!(resets(server), [(5, Reason::STREAM_CLOSED)]);
            assert_eq!(server.accept().map(|request| request.stream), Some(7));
        }
    }
}

#[test]
fn frames_on_a_stream_reset_by_this_side_are_ignored() {
    let mut server = server();
    let last = RemovedStreams::RECENT as u32 * 2 + 21;
    for id in (1..=last).step_by(2) {
        feed(&mut server, &post(id)).unwrap();
        server.accept().unwrap();
        server.respond(id, &ResponseHead::build(200, &[]), false, true);
        server.forget(id);
        assert_eq!(resets(&mut server), [(id, Reason::NONE)]);
    }
    // A malformed request that never became a stream.
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS, last + 2, b"\x82")).unwrap();
    for id in [1, 21, 23, last - 2, last, last + 2] {
        feed(&mut server, &frame(FrameKind::Data, END_STREAM, id, b"late")).unwrap();
    }
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, last, b"")).unwrap();
    assert_eq!(server.removed.recent.len(), RemovedStreams::RECENT);
}

#[test]
fn large_heads_are_detected_even_in_small_blocks() {
    let mut server = server();
    let large = [&b"\x82\x86\x84\x01\x01a\x00\x01x\x7f\xa1\x0f"[..], &[b'a'; 2080]].concat();
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, 1, &large)).unwrap();
    assert!(server.accept().is_some_and(|request| request.oversized.is_none()));
    // A field of 2 kB in the table, then its index 4000 times.
    let mut bomb = [&b"\x82\x86\x84\x01\x01a\x40\x01x\x7f\xa1\x0f"[..], &[b'a'; 2080]].concat();
    bomb.extend([0xbe; 4000]);
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, 3, &bomb)).unwrap();
    assert!(server.accept().is_some_and(|request| request.oversized == Some(HeadError::TooLarge)));
    // Many of them are a flood, although each gets a response.
    let again = |n: u32| frame(FrameKind::Headers, END_HEADERS | END_STREAM, 5 + 2 * n, &bomb);
    let mut answered = 0;
    while let Ok(()) = feed(&mut server, &again(answered)) {
        let request = server.accept().unwrap();
        assert!(server.respond(request.stream, &ResponseHead::build(431, &[]), false, true));
        server.forget(request.stream);
        frames(&mut server);
        answered += 1;
        assert!(answered < 3000);
    }
}

#[test]
fn streams_beyond_the_limit_are_refused() {
    let mut server = server();
    for n in 0..11 {
        feed(&mut server, &get(n * 2 + 1)).unwrap();
    }
    assert_eq!(resets(&mut server), [(21, Reason::REFUSED)]);
    let mut client = client();
    feed(&mut client, &frame(FrameKind::Settings, 0, 0, b"\0\x03\0\0\0\x01")).unwrap();
    assert_eq!(client.capacity(), 1);
    let first = client.request(&request(), true, false).unwrap().unwrap();
    assert!(matches!(client.request(&request(), true, false), Some(Err(StreamError::Unprocessed))));
    client.forget(first);
    assert_eq!(resets(&mut client), [(first, Reason::CANCEL)]);
    assert!(matches!(client.request(&request(), true, false), Some(Ok(_))));
}

#[test]
fn a_graceful_shutdown_completes_streams() {
    let (mut client, mut server) = (client(), server());
    let first = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    server.begin_shutdown();
    // A request in transit during the shutdown is accepted.
    let second = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    assert!(
        !client.is_usable()
            && matches!(client.request(&request(), true, false), Some(Err(StreamError::Unprocessed)))
    );
    for id in [first, second] {
        assert!(!server.is_over() && !client.is_over());
        assert_eq!(server.accept().unwrap().stream, id);
        assert!(server.respond(id, &ResponseHead::build(200, &[]), false, true));
        server.forget(id);
        talk(&mut client, &mut server);
        let mut head = ResponseHead::default();
        assert!(client.poll_answer(&cx(), id, &mut head).is_ready());
        client.forget(id);
    }
    assert!(server.is_over() && client.is_over());
}

#[test]
fn a_shutdown_does_not_wait_for_an_acknowledgement() {
    let (mut client, mut server) = (client(), server());
    let first = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    server.begin_shutdown();
    assert!(server.is_shutting_down());
    server.refuse();
    assert!(!server.is_shutting_down());
    let second = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    assert_eq!(server.accept().unwrap().stream, first);
    assert!(server.accept().is_none());
    let mut answer = |id| client.poll_answer(&cx(), id, &mut ResponseHead::default());
    assert!(
        answer(first).is_pending() && matches!(answer(second), Poll::Ready(Err(StreamError::Unprocessed)))
    );
}

#[test]
fn unprocessed_requests_are_reported() {
    let mut client = client();
    let ids: Vec<_> = (0..3).map(|_| client.request(&request(), true, false).unwrap().unwrap()).collect();
    feed(&mut client, &frame(FrameKind::Reset, 0, ids[0], &7_u32.to_be_bytes())).unwrap();
    feed(&mut client, &frame(FrameKind::GoAway, 0, 0, &[0, 0, 0, ids[1] as u8, 0, 0, 0, 0])).unwrap();
    let mut answer = |id| client.poll_answer(&cx(), id, &mut ResponseHead::default());
    assert!(matches!(answer(ids[0]), Poll::Ready(Err(StreamError::Unprocessed))));
    assert!(answer(ids[1]).is_pending());
    assert!(matches!(answer(ids[2]), Poll::Ready(Err(StreamError::Unprocessed))));
}

#[test]
fn discarded_content_reopens_the_window() {
    let mut server = server();
    let data = frame(FrameKind::Data, 0, 1, &[0; 16 * 1024]);
    feed(&mut server, &post(1)).unwrap();
    feed(&mut server, &data.repeat(8)).unwrap();
    server.accept().unwrap();
    server.forget(1);
    // In transit before the client has received the reset.
    feed(&mut server, &data.repeat(64)).unwrap();
    let credited: u32 = frames(&mut server)
        .into_iter()
        .filter(|(kind, stream, _)| (*kind, *stream) == (FrameKind::WindowUpdate, 0))
        .map(|(.., payload)| frame::number(&payload).unwrap())
        .sum();
    assert!(credited + CONNECTION_WINDOW / 2 > 72 * 16 * 1024, "{credited}");
}

proptest::proptest! {
    #[test]
    fn any_frames_are_handled(
        client: bool,
        sent: Vec<(u8, u8, u32, Vec<u8>)>,
    ) {
        let mut session = if client { self::client() } else { server() };
        if client {
            (0..3).for_each(|_| drop(session.request(&request(), false, false)));
        }
        for (kind, flags, stream, payload) in sent {
            let mut bytes = frame(FrameKind::Data, flags, stream % 8, &payload);
            bytes[3] = kind % 11;
            if feed(&mut session, &bytes).is_err() {
                break;
            }
        }
    }
}
