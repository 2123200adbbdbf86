//! Limits on input and on the memory that a peer can occupy.

use super::*;

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
    let calm = |stopped: Option<(u32, Reason)>, max: u32| {
        let (round, reason) = stopped.expect("never stopped");
        assert!(reason == Reason::ENHANCE_YOUR_CALM && round < max, "{reason} after {round}");
    };
    let reset = |stream| frame(FrameKind::Reset, 0, stream, &8_u32.to_be_bytes());
    // CVE-2023-44487.
    calm(flood(&mut server(), Box::new(move |n| [get(n * 2 + 1), reset(n * 2 + 1)].concat())), 300);
    // The same with errors that make this side reset streams.
    let bad = |n| frame(FrameKind::Headers, END_HEADERS | END_STREAM, n * 2 + 1, b"\x82");
    calm(flood(&mut server(), Box::new(bad)), 300);
    calm(flood(&mut server(), Box::new(|_| frame(FrameKind::Ping, 0, 0, &[0; 8]))), 3000);
    calm(flood(&mut server(), Box::new(|_| frame(FrameKind::Settings, 0, 0, b""))), 3000);
    let update = |stream| frame(FrameKind::WindowUpdate, 0, stream, &1_u32.to_be_bytes());
    calm(flood(&mut server(), Box::new(move |_| update(0))), 3000);
    // The same on removed streams.
    let mut past = server();
    feed(&mut past, &get(1)).unwrap();
    calm(flood(&mut past, Box::new(move |_| update(1))), 3000);
    assert_eq!(past.exceeding_frame, Some(FrameKind::WindowUpdate));
    // A receiver of content may send window updates in small steps.
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
    // An endless header block, in empty frames and in others.
    for payload in [&b""[..], &[0; 16 * 1024]] {
        let mut head = server();
        feed(&mut head, &frame(FrameKind::Headers, 0, 1, GET)).unwrap();
        calm(flood(&mut head, Box::new(move |_| frame(FrameKind::Continuation, 0, 1, payload))), 100);
    }
    // A peer with as much useful as useless traffic is served.
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

/// Returns a server with this number of streams whose responses have started.
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
fn settings_are_limited_and_the_last_value_applies() {
    let windows = |count: u32| (0..count).map(|n| (4, 1000 + n)).collect::<Vec<_>>();
    let mut session = serving(3);
    feed(&mut session, &settings(&windows(32))).unwrap();
    assert_eq!((session.peer.window, session.streams[&5].send_window), (1031, 1031));
    // CVE-2020-11080.
    assert_eq!(feed(&mut session, &settings(&windows(33))), Err(Reason::ENHANCE_YOUR_CALM));
    assert_eq!(session.exceeding_frame, Some(FrameKind::Settings));
    // Every value must be valid, although only the last one applies.
    assert_eq!(feed(&mut serving(3), &settings(&[(4, 1 << 31), (4, 1000)])), Err(Reason::FLOW_CONTROL));
    assert_eq!(feed(&mut serving(3), &settings(&[(5, 1), (5, 1 << 14)])), Err(Reason::PROTOCOL));
    // Of two table sizes in one frame, the smaller applies before the larger.
    feed(&mut session, &settings(&[(1, 0), (1, 4096)])).unwrap();
    let mut block = Vec::new();
    session.encoder.begin(&mut block);
    assert_eq!(block, b"\x20\x3f\xe1\x1f");
}

#[test]
fn frames_that_affect_all_streams_cost_by_their_number() {
    let max = |session: &mut Session, next: &dyn Fn(u32) -> Vec<u8>| {
        let stopped = (0..3000).find(|n| {
            let result = feed(session, &next(*n));
            frames(session);
            result == Err(Reason::ENHANCE_YOUR_CALM)
        });
        stopped.expect("never stopped")
    };
    let resize = |n: u32| settings(&[(4, 65_535 + (n + 1) % 2)]);
    assert!((50..100).contains(&max(&mut serving(1000), &resize)));
    assert!(max(&mut serving(10), &resize) > 1900);
    // A few changes are allowed with any number of streams.
    assert!(max(&mut serving(66_000), &resize) > 2);
    let mut client = client();
    client.limits.options = Http2Options::new(1000);
    (0..1000).for_each(|_| drop(client.request(&request(), false, false)));
    let leave = frame(FrameKind::GoAway, 0, 0, &[0; 8]);
    assert!((50..100).contains(&max(&mut client, &|_| leave.clone())));
}

#[test]
fn streams_are_woken_as_far_as_the_window_suffices() {
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
    // The woken stream does not use the window, so that the others are woken, until none is left.
    for left in (0..899).rev() {
        assert_eq!(session.written(), left > 0);
        assert_eq!(woken(&mut session), 1);
    }
    session.send_window = 0;
    stall(&mut session);
    feed(&mut session, &update(0, 250)).unwrap();
    assert!(session.written());
    assert_eq!(woken(&mut session), 3);
    // A stream that also waits for its own window is woken when both are open.
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
fn heads_that_can_wait_do_so_while_much_is_unwritten() {
    let mut session = serving(3);
    let woken = |session: &mut Session| std::mem::take(&mut session.wakes).len();
    assert_eq!(session.poll_space(&cx(), 1), Poll::Ready(()));
    session.out.extend(&[0; OUT]);
    // Repeated polls register once, and no window matters.
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
fn few_interim_responses_are_kept() {
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
    // A peer that sends them endlessly is disconnected.
    let id = session.request(&request(), true, false).unwrap().unwrap();
    let interim = frame(FrameKind::Headers, END_HEADERS, id, b"\x08\x03103");
    let flood = interim.repeat(INTERIM + 1 + LIMITS.options.useless_frames as usize);
    assert_eq!(feed(&mut session, &flood), Err(Reason::ENHANCE_YOUR_CALM));
}
