use std::task::{Poll, Waker};

use super::*;
use crate::http2::frame::{END_HEADERS, END_STREAM, FrameKind, Head};

const LIMITS: SessionLimits =
    SessionLimits { head: Bounds { size: 4096, fields: 20 }, options: Http2Options::new(10) };
const CONNECTION_WINDOW: u32 = LIMITS.options.connection_window;

fn feed(session: &mut Session, bytes: &[u8]) -> Result<(), Reason> {
    // In pieces, as they may arrive.
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

/// `GET http://a/` without any table.
const GET: &[u8] = b"\x82\x86\x84\x01\x01a";

fn get(stream: u32) -> Vec<u8> {
    frame(FrameKind::Headers, END_HEADERS | END_STREAM, stream, GET)
}

fn post(stream: u32) -> Vec<u8> {
    frame(FrameKind::Headers, END_HEADERS, stream, b"\x83\x86\x84\x01\x01a")
}

/// What waits to be written, which is taken.
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

/// Gives each what the other has to say until both are silent.
fn talk(a: &mut Session, b: &mut Session) {
    while !a.out.is_empty() || !b.out.is_empty() {
        let mut said = std::mem::take(&mut a.out);
        feed(b, said.bytes()).unwrap();
        a.written();
        said = std::mem::take(&mut b.out);
        feed(a, said.bytes()).unwrap();
        b.written();
    }
}

#[test]
fn a_client_and_a_server_understand_each_other() {
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

        let asked = server.accept().unwrap();
        assert_eq!((asked.head.method(), asked.head.path(), asked.end), ("POST", "/x", false));
        assert!(asked.head.has("x-one") && !asked.head.has("connection"));
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
fn content_flows_as_windows_allow() {
    let (mut client, mut server) = (client(), server());
    let id = client.request(&request(), false, false).unwrap().unwrap();
    let Poll::Ready(Some(room)) = client.poll_room(&cx(), id, 1 << 20) else { panic!("no room") };
    assert_eq!(room, FIRST_WINDOW as usize);
    assert!(client.send(id, &vec![0; room], false));
    assert!(client.poll_room(&cx(), id, 1).is_pending());
    talk(&mut client, &mut server);
    // The stream has room by the server's settings, and the connection by what came with them.
    frame::window_update(&mut server.out, 0, 10);
    talk(&mut client, &mut server);
    assert!(client.poll_room(&cx(), id, 100).is_pending());
    frame::window_update(&mut server.out, id, 7);
    talk(&mut client, &mut server);
    assert_eq!(client.poll_room(&cx(), id, 100), Poll::Ready(Some(7)));
    frame::settings(&mut server.out, &[(4, 65_535 + 1)]);
    talk(&mut client, &mut server);
    assert_eq!(client.poll_room(&cx(), id, 100), Poll::Ready(Some(8)));
    // What is handed on makes room again, a good part at a time; what nobody takes does so for the connection.
    let asked = server.accept().unwrap();
    server.release(asked.stream, 1 << 30);
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
fn bad_requests_end_their_streams_alone() {
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
    // More and less content than was said.
    for (id, content) in [(11, &b"abc"[..]), (13, b"a")] {
        let block = b"\x83\x86\x84\x01\x01a\x00\x0econtent-length\x012";
        feed(&mut server, &frame(FrameKind::Headers, END_HEADERS, id, block)).unwrap();
        feed(&mut server, &frame(FrameKind::Data, END_STREAM, id, content)).unwrap();
        assert_eq!(resets(&mut server), [(id, Reason::PROTOCOL)]);
    }
    // Trailers that do not end the stream, and content after the end.
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
fn what_breaks_the_rules_ends_the_connection() {
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
    // More than the window lets in.
    let mut server = self::server();
    feed(&mut server, &post(1)).unwrap();
    let data = frame(FrameKind::Data, 0, 1, &[0; 16 * 1024]);
    let sixteen = data.repeat(16);
    feed(&mut server, &sixteen).unwrap();
    feed(&mut server, &data).unwrap();
    assert_eq!(resets(&mut server), [(1, Reason::FLOW_CONTROL)]);
}

#[test]
fn on_what_the_peer_has_ended_nothing_may_follow() {
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
        // Sent to its end; never opened, as a later one was.
        for begin in [get(5), get(7)] {
            assert_eq!(feed(&mut answered(&begin), &late), Err(Reason::STREAM_CLOSED), "{begin:?}");
        }
        // Reset: that concerns no other stream. The same while somebody here is still busy with it.
        let mut gone = answered(&[post(5), reset(5)].concat());
        let mut busy = server();
        feed(&mut busy, &post(5)).unwrap();
        busy.accept().unwrap();
        feed(&mut busy, &reset(5)).unwrap();
        frames(&mut busy);
        for server in [&mut gone, &mut busy] {
            feed(server, &[late.clone(), get(7)].concat()).unwrap();
            assert_eq!(resets(server), [(5, Reason::STREAM_CLOSED)]);
            assert_eq!(server.accept().map(|request| request.stream), Some(7));
        }
    }
}

#[test]
fn what_follows_on_a_stream_given_up_is_ignored() {
    let mut server = server();
    let last = Past::RECENT as u32 * 2 + 21;
    for id in (1..=last).step_by(2) {
        feed(&mut server, &post(id)).unwrap();
        server.accept().unwrap();
        server.respond(id, &ResponseHead::build(200, &[]), false, true);
        server.forget(id);
        assert_eq!(resets(&mut server), [(id, Reason::NONE)]);
    }
    // What was malformed and never was a stream.
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS, last + 2, b"\x82")).unwrap();
    for id in [1, 21, 23, last - 2, last, last + 2] {
        feed(&mut server, &frame(FrameKind::Data, END_STREAM, id, b"late")).unwrap();
    }
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, last, b"")).unwrap();
    assert_eq!(server.past.recent.len(), Past::RECENT);
}

#[test]
fn floods_are_stopped() {
    let flood = |session: &mut Session, mut next: Box<dyn FnMut(u32) -> Vec<u8>>| {
        for round in 0..10_000 {
            if let Err(reason) = feed(session, &next(round)) {
                return Some((round, reason));
            }
            frames(session);
            while let Some(request) = session.accept() {
                session.forget(request.stream);
            }
        }
        None
    };
    let calm = |stopped: Option<(u32, Reason)>, most: u32| {
        let (round, reason) = stopped.expect("never stopped");
        assert!(reason == Reason::CALM && round < most, "{reason} after {round}");
    };
    let reset = |stream| frame(FrameKind::Reset, 0, stream, &8_u32.to_be_bytes());
    // CVE-2023-44487.
    calm(flood(&mut server(), Box::new(move |n| [get(n * 2 + 1), reset(n * 2 + 1)].concat())), 300);
    // The same by what makes us reset.
    let bad = |n| frame(FrameKind::Headers, END_HEADERS | END_STREAM, n * 2 + 1, b"\x82");
    calm(flood(&mut server(), Box::new(bad)), 300);
    calm(flood(&mut server(), Box::new(|_| frame(FrameKind::Ping, 0, 0, &[0; 8]))), 3000);
    calm(flood(&mut server(), Box::new(|_| frame(FrameKind::Settings, 0, 0, b""))), 3000);
    let update = |stream| frame(FrameKind::WindowUpdate, 0, stream, &1_u32.to_be_bytes());
    calm(flood(&mut server(), Box::new(move |_| update(0))), 3000);
    // Of a stream that is no more, too.
    let mut past = server();
    feed(&mut past, &get(1)).unwrap();
    calm(flood(&mut past, Box::new(move |_| update(1))), 3000);
    assert_eq!(past.culprit, Some(FrameKind::WindowUpdate));
    // Who gets content may say bit by bit how much it has taken.
    let mut reader = server();
    feed(&mut reader, &get(1)).unwrap();
    reader.accept().unwrap();
    assert!(reader.respond(1, &ResponseHead::build(200, &[]), false, false));
    for _ in 0..2000 {
        assert!(reader.send(1, b"abcde", false));
        frames(&mut reader);
        (0..5).for_each(|_| feed(&mut reader, &[update(0), update(1)].concat()).unwrap());
    }
    calm(flood(&mut server(), Box::new(|_| frame(FrameKind::Priority, 0, 3, &[0; 5]))), 3000);
    let mut empty = server();
    feed(&mut empty, &post(1)).unwrap();
    calm(flood(&mut empty, Box::new(|_| frame(FrameKind::Data, 0, 1, b""))), 3000);
    // A head without end, in frames that are empty and in frames that are not.
    for payload in [&b""[..], &[0; 16 * 1024]] {
        let mut head = server();
        feed(&mut head, &frame(FrameKind::Headers, 0, 1, GET)).unwrap();
        calm(flood(&mut head, Box::new(move |_| frame(FrameKind::Continuation, 0, 1, payload))), 100);
    }
    // Those who do as much good as harm are served.
    let mut busy = server();
    let both = |n: u32| [get(n * 4 + 1), get(n * 4 + 3), reset(n * 4 + 3)].concat();
    for n in 0..2000 {
        feed(&mut busy, &both(n)).unwrap();
        let request = busy.accept().unwrap();
        assert!(busy.respond(request.stream, &ResponseHead::build(200, &[]), false, true));
        busy.forget(request.stream);
        while let Some(request) = busy.accept() {
            busy.forget(request.stream);
        }
        frames(&mut busy);
    }
}

fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let mut out = Buffer::default();
    frame::settings(&mut out, values);
    out.bytes().to_vec()
}

/// A server with this many streams, whose answers have begun.
fn serving(streams: u32) -> Session {
    let limits = SessionLimits { options: Http2Options::new(streams), ..LIMITS };
    let mut session = Session { limits, ..server() };
    for id in (0..streams).map(|n| n * 2 + 1) {
        feed(&mut session, &get(id)).unwrap();
        session.accept().unwrap();
        assert!(session.respond(id, &ResponseHead::build(200, &[]), false, false));
    }
    frames(&mut session);
    session
}

#[test]
fn a_frame_has_few_settings_of_which_the_last_counts() {
    let windows = |count: u32| (0..count).map(|n| (4, 1000 + n)).collect::<Vec<_>>();
    let mut session = serving(3);
    feed(&mut session, &settings(&windows(32))).unwrap();
    assert_eq!((session.peer.window, session.streams[&5].send_window), (1031, 1031));
    // CVE-2020-11080.
    assert_eq!(feed(&mut session, &settings(&windows(33))), Err(Reason::CALM));
    assert_eq!(session.culprit, Some(FrameKind::Settings));
    // Every value must be one, though only the last counts.
    assert_eq!(feed(&mut serving(3), &settings(&[(4, 1 << 31), (4, 1000)])), Err(Reason::FLOW_CONTROL));
    assert_eq!(feed(&mut serving(3), &settings(&[(5, 1), (5, 1 << 14)])), Err(Reason::PROTOCOL));
    // Of two table sizes in one frame, the smaller applies before the larger.
    feed(&mut session, &settings(&[(1, 0), (1, 4096)])).unwrap();
    let mut block = Vec::new();
    session.encoder.begin(&mut block);
    assert_eq!(block, b"\x20\x3f\xe1\x1f");
}

#[test]
fn frames_that_concern_all_streams_cost_as_many_as_there_are() {
    let most = |session: &mut Session, next: &dyn Fn(u32) -> Vec<u8>| {
        let stopped = (0..3000).find(|n| {
            let result = feed(session, &next(*n));
            frames(session);
            result == Err(Reason::CALM)
        });
        stopped.expect("never stopped")
    };
    let resize = |n: u32| settings(&[(4, 65_535 + (n + 1) % 2)]);
    assert!((50..100).contains(&most(&mut serving(1000), &resize)));
    assert!(most(&mut serving(10), &resize) > 1900);
    // However many streams there are, some changes are allowed.
    assert!(most(&mut serving(66_000), &resize) > 2);
    let mut client = client();
    client.limits.options = Http2Options::new(1000);
    (0..1000).for_each(|_| drop(client.request(&request(), false, false)));
    let leave = frame(FrameKind::GoAway, 0, 0, &[0; 8]);
    assert!((50..100).contains(&most(&mut client, &|_| leave.clone())));
}

#[test]
fn as_many_streams_are_woken_as_the_window_can_serve() {
    let mut session = serving(900);
    let stall = |session: &mut Session| {
        for id in (0..900).map(|n| n * 2 + 1) {
            assert!(session.poll_room(&cx(), id, 100).is_pending());
        }
    };
    session.send_window = 0;
    stall(&mut session);
    let woken = |session: &mut Session| std::mem::take(&mut session.wakes).len();
    let update = |stream, count: u32| frame(FrameKind::WindowUpdate, 0, stream, &count.to_be_bytes());
    for _ in 0..10 {
        feed(&mut session, &update(0, 1)).unwrap();
    }
    assert!(session.written());
    assert_eq!(woken(&mut session), 1, "which wants more than there is");
    // It does not use it, so that the others get their turn, and in the end nobody is left.
    for left in (0..899).rev() {
        assert_eq!(session.written(), left > 0);
        assert_eq!(woken(&mut session), 1);
    }
    session.send_window = 0;
    stall(&mut session);
    feed(&mut session, &update(0, 250)).unwrap();
    assert!(session.written());
    assert_eq!(woken(&mut session), 3);
    // One that waits for its own window, too, is woken once it has both.
    session.streams.values_mut().for_each(|stream| stream.send_window = 0);
    assert!(!session.written() && woken(&mut session) == 0);
    assert!(session.poll_room(&cx(), 99, 100).is_pending());
    feed(&mut session, &[update(99, 5), update(99, 5)].concat()).unwrap();
    assert_eq!(woken(&mut session), 1);
    assert_eq!(session.poll_room(&cx(), 99, 100), Poll::Ready(Some(10)));
    // A larger initial window wakes the streams whose windows it opens.
    feed(&mut session, &settings(&[(4, 65_536)])).unwrap();
    assert_eq!(woken(&mut session), 896, "those that still wait");
    feed(&mut session, &settings(&[(4, 65_537)])).unwrap();
    assert_eq!(woken(&mut session), 0);
}

#[test]
fn large_heads_are_told_apart_however_small_their_blocks() {
    let mut server = server();
    let large = [&b"\x82\x86\x84\x01\x01a\x00\x01x\x7f\xa1\x0f"[..], &[b'a'; 2080]].concat();
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, 1, &large)).unwrap();
    assert!(server.accept().is_some_and(|request| request.oversized.is_none()));
    // A field of 2 kB in the table, then 4000 times its index.
    let mut bomb = [&b"\x82\x86\x84\x01\x01a\x40\x01x\x7f\xa1\x0f"[..], &[b'a'; 2080]].concat();
    bomb.extend([0xbe; 4000]);
    feed(&mut server, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, 3, &bomb)).unwrap();
    assert!(server.accept().is_some_and(|request| request.oversized == Some(HeadError::TooLarge)));
    // Again and again they are a flood, though each is answered.
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
    assert!(matches!(client.request(&request(), true, false), Some(Err(Lost::Unprocessed))));
    client.forget(first);
    assert_eq!(resets(&mut client), [(first, Reason::CANCEL)]);
    assert!(matches!(client.request(&request(), true, false), Some(Ok(_))));
}

#[test]
fn those_who_leave_finish_what_they_have() {
    let (mut client, mut server) = (client(), server());
    let first = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    server.leave();
    // On its way while the server leaves: still taken.
    let second = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    assert!(
        !client.is_usable()
            && matches!(client.request(&request(), true, false), Some(Err(Lost::Unprocessed)))
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
fn who_does_not_say_that_it_knows_is_not_waited_for() {
    let (mut client, mut server) = (client(), server());
    let first = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    server.leave();
    assert!(server.is_leaving());
    server.refuse();
    assert!(!server.is_leaving());
    let second = client.request(&request(), true, false).unwrap().unwrap();
    talk(&mut client, &mut server);
    assert_eq!(server.accept().unwrap().stream, first);
    assert!(server.accept().is_none());
    let mut answer = |id| client.poll_answer(&cx(), id, &mut ResponseHead::default());
    assert!(answer(first).is_pending() && matches!(answer(second), Poll::Ready(Err(Lost::Unprocessed))));
}

#[test]
fn what_a_server_has_not_looked_at_is_told_apart() {
    let mut client = client();
    let ids: Vec<_> = (0..3).map(|_| client.request(&request(), true, false).unwrap().unwrap()).collect();
    feed(&mut client, &frame(FrameKind::Reset, 0, ids[0], &7_u32.to_be_bytes())).unwrap();
    feed(&mut client, &frame(FrameKind::GoAway, 0, 0, &[0, 0, 0, ids[1] as u8, 0, 0, 0, 0])).unwrap();
    let mut answer = |id| client.poll_answer(&cx(), id, &mut ResponseHead::default());
    assert!(matches!(answer(ids[0]), Poll::Ready(Err(Lost::Unprocessed))));
    assert!(answer(ids[1]).is_pending());
    assert!(matches!(answer(ids[2]), Poll::Ready(Err(Lost::Unprocessed))));
}

#[test]
fn content_that_nobody_takes_does_not_use_up_the_window() {
    let mut server = server();
    let data = frame(FrameKind::Data, 0, 1, &[0; 16 * 1024]);
    feed(&mut server, &post(1)).unwrap();
    feed(&mut server, &data.repeat(8)).unwrap();
    server.accept().unwrap();
    server.forget(1);
    // On its way before the client knows.
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
    fn any_frames_are_survived(
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

#[test]
fn a_header_block_counts_as_one_frame_and_content_once_it_has_begun() {
    let mut session = server();
    let mut input = Buffer::default();
    let mut feed = |bytes: &[u8], frames: u64| {
        let before = session.frames;
        for byte in bytes {
            input.extend(&[*byte]);
            session.feed(&mut input).unwrap();
        }
        assert_eq!(session.frames - before, frames, "{bytes:?}");
    };
    let content = frame(FrameKind::Data, 0, 1, b"content");
    feed(&frame(FrameKind::Headers, 0, 1, b""), 0);
    feed(&frame(FrameKind::Continuation, 0, 1, b"\x83\x86\x84"), 0);
    feed(&frame(FrameKind::Continuation, END_HEADERS, 1, b"\x01\x01a"), 1);
    feed(&content[..frame::HEAD - 1], 0);
    feed(&content[frame::HEAD - 1..frame::HEAD], 1);
    feed(&content[frame::HEAD..], 0);
    feed(&frame(FrameKind::Ping, 0, 0, &[0; 8]), 1);
}

#[test]
fn heads_that_may_wait_do_so_while_much_is_unwritten() {
    let mut session = serving(3);
    let woken = |session: &mut Session| std::mem::take(&mut session.wakes).len();
    assert_eq!(session.poll_space(&cx(), 1), Poll::Ready(()));
    session.out.extend(&[0; OUT]);
    // However often it asks it waits once, and no window counts.
    session.send_window = 0;
    for id in [1, 1, 3, 5] {
        assert!(session.poll_space(&cx(), id).is_pending());
    }
    assert_eq!(session.crowded, [1, 3, 5]);
    session.reset(3, Reason::CANCEL);
    assert_eq!(session.poll_space(&cx(), 3), Poll::Ready(()), "nothing is sent on it");
    session.forget(5);
    session.out.clear();
    session.written();
    assert_eq!((woken(&mut session), session.crowded.len()), (2, 0));
    assert_eq!(session.poll_space(&cx(), 1), Poll::Ready(()));
}

#[test]
fn a_server_that_does_not_read_gets_no_more_requests() {
    let mut session = client();
    let long = "x".repeat(4_000);
    let head = RequestHead::build("GET", "/", "a", &[("x-long", &long)]);
    let mut opened = 0;
    while let Ok(id) = session.request(&head, true, false).unwrap() {
        session.forget(id);
        opened += 1;
        assert!(session.out.len() < STUCK + 2 * long.len());
    }
    assert!(opened > 100 && !session.is_usable(), "{opened}");
    frames(&mut session);
    assert!(session.is_usable() && session.request(&head, true, false).unwrap().is_ok());
}

#[test]
fn of_interim_answers_that_nobody_takes_few_are_kept() {
    let mut session = client();
    let interim = frame(FrameKind::Headers, END_HEADERS, 1, b"\x08\x03103");
    let id = session.request(&request(), true, false).unwrap().unwrap();
    feed(&mut session, &interim.repeat(2 * INTERIM)).unwrap();
    feed(&mut session, &frame(FrameKind::Headers, END_HEADERS | END_STREAM, 1, b"\x88")).unwrap();
    let mut head = ResponseHead::default();
    for _ in 0..INTERIM {
        assert!(matches!(session.poll_answer(&cx(), id, &mut head), Poll::Ready(Ok(None))));
    }
    assert!(matches!(session.poll_answer(&cx(), id, &mut head), Poll::Ready(Ok(Some(_)))));
    assert_eq!(head.status(), 200);
    // One who sends them without end is not served.
    let id = session.request(&request(), true, false).unwrap().unwrap();
    let interim = frame(FrameKind::Headers, END_HEADERS, id, b"\x08\x03103");
    let flood = interim.repeat(INTERIM + 1 + LIMITS.options.chatter as usize);
    assert_eq!(feed(&mut session, &flood), Err(Reason::CALM));
}
