//! Runs thousands of sidecars on one thread.

use std::{net::SocketAddr, ops::Range, os::fd::AsFd as _, time::Duration};

use anyhow::{Context as _, bail};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    AUTHORITY,
    connection::Connection,
    message::{Kind, Response},
    sidecar::{Plan, Sidecar},
};
use crate::{
    clock,
    schedule::nanoseconds,
    stream::{Stream, Tls},
};

/// Size of the read buffer in bytes.
const SCRATCH: usize = 256 * 1_024;
/// Maximum length in bytes of a response whose resources are inspected. Responses to changes are shorter.
const MAX_INSPECTED: u64 = 64 << 10;
/// Interval at which a condition is checked.
const CHECK: Duration = Duration::from_millis(10);

/// All sidecars, and the events since they were last reset.
pub(crate) struct Fleet<'a> {
    target: SocketAddr,
    tls: Vec<Tls>,
    pub(crate) plan: &'a Plan,
    /// Number of sidecars per connection.
    streams: usize,
    epoll: Epoll,
    slots: Vec<Option<Slot>>,
    scratch: Vec<u8>,
    message: Vec<u8>,
    pub(crate) received: FleetEvents,
}

struct Slot {
    connection: Connection,
    began: u64,
    sidecars: Vec<Sidecar>,
    /// Output waits until the kernel accepts more.
    blocked: bool,
}

/// Events since they were last reset.
#[derive(Debug, Default)]
pub(crate) struct FleetEvents {
    /// Nanoseconds from the start of a connection until each sidecar was configured.
    pub(crate) configured: Vec<u64>,
    /// Times at which sidecars received the awaited type, in nanoseconds of [`clock::now`].
    pub(crate) changed: Vec<u64>,
    pub(crate) bytes: u64,
    pub(crate) resources: u64,
    pub(crate) responses: u64,
    /// For each sidecar by its number: true if it has received a response.
    reached: Vec<bool>,
    /// The awaited type, and for each sidecar by its number: true if it still lacks the type.
    wanted: Option<(Kind, Vec<bool>)>,
}

impl<'a> Fleet<'a> {
    /// `tls` has one entry per namespace, then one for gateways, or none for plain text.
    pub(crate) fn new(
        target: SocketAddr,
        tls: Vec<Tls>,
        plan: &'a Plan,
        streams: usize,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            target,
            tls,
            plan,
            streams,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            slots: Vec::new(),
            scratch: vec![0; SCRATCH],
            message: Vec::new(),
            received: FleetEvents::default(),
        })
    }

    /// Returns all sidecars that are connected or connecting.
    pub(crate) fn sidecars(&self) -> impl Iterator<Item = Sidecar> {
        self.slots.iter().flatten().flat_map(|slot| slot.sidecars.iter().copied())
    }

    /// Connects the sidecars with these numbers, at most `at_once` at a time, and waits until all are configured.
    pub(crate) fn connect(
        &mut self,
        numbers: Range<usize>,
        at_once: usize,
        patience: Duration,
    ) -> anyhow::Result<()> {
        let mut numbers: Vec<usize> = numbers.collect();
        let deadline = clock::now() + nanoseconds(patience);
        // The sidecars of a connection share one certificate, so they must be in one namespace.
        let (plan, streams) = (self.plan, self.streams);
        let block = plan.namespaces * streams;
        let namespace = move |number: &usize| plan.namespace(*number);
        numbers.sort_by_key(|number| (number / block, namespace(number)));
        let same = |one: &usize, other: &usize| namespace(one) == namespace(other);
        let mut next = numbers.chunk_by(same).flat_map(|numbers| numbers.chunks(streams));
        let mut expected = self.received.configured.len();
        let wanted = expected + numbers.len();
        while self.received.configured.len() < wanted {
            while expected - self.received.configured.len() < at_once
                && let Some(numbers) = next.next()
            {
                self.slots.push(None);
                self.open(self.slots.len() - 1, numbers)?;
                expected += numbers.len();
            }
            self.turn(deadline, deadline).with_context(|| {
                format!("{} of {wanted} sidecars are configured", self.received.configured.len())
            })?;
        }
        Ok(())
    }

    /// Closes and reopens a share of the connections in turn for this duration. A connection is closed only once its
    /// sidecars are configured. Calls `meanwhile` between events. Returns the number of sidecars that reconnected in
    /// this duration, and waits for the others.
    pub(crate) fn churn(
        &mut self,
        share: f64,
        length: Duration,
        at_once: usize,
        mut meanwhile: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<usize> {
        let (start, patience) = (clock::now(), Duration::from_secs(60));
        let end = start + nanoseconds(length);
        let moving = ((self.slots.len() as f64 * share) as usize).max(1);
        let (first, mut under_way, mut next) = (self.received.configured.len(), 0, 0);
        while clock::now() < end {
            meanwhile()?;
            under_way = under_way.max(self.received.configured.len() - first);
            while under_way - (self.received.configured.len() - first) < at_once.min(moving * self.streams)
                && self.is_configured(next % moving)
            {
                let at = next % moving;
                let numbers: Vec<usize> = self.slots[at]
                    .take()
                    .map(|slot| slot.sidecars.iter().map(|one| one.number).collect())
                    .unwrap_or_default();
                under_way += numbers.len();
                self.open(at, &numbers)?;
                next += 1;
            }
            self.turn(end + nanoseconds(patience), end + nanoseconds(patience))?;
        }
        let back = self.received.configured.len() - first;
        while self.received.configured.len() - first < under_way {
            self.turn(end + nanoseconds(patience), end + nanoseconds(patience))?;
        }
        Ok(back)
    }

    /// Returns true if all sidecars of a connection are configured.
    fn is_configured(&self, at: usize) -> bool {
        let sidecars = self.slots[at].iter().flat_map(|slot| &slot.sidecars);
        sidecars.into_iter().all(|sidecar| sidecar.is_configured(self.plan))
    }

    /// Begins to wait for a response of this type at all sidecars that will receive one. Returns their number.
    pub(crate) fn begin_wait(&mut self, kind: Kind, by: impl Fn(&Plan, Sidecar) -> bool) -> usize {
        let length = self.sidecars().map(|sidecar| sidecar.number + 1).max().unwrap_or_default();
        let (mut by_number, mut count) = (vec![false; length], 0);
        for sidecar in self.sidecars().filter(|sidecar| by(self.plan, *sidecar)) {
            by_number[sidecar.number] = true;
            count += 1;
        }
        self.received = FleetEvents {
            wanted: Some((kind, by_number)),
            reached: vec![false; length],
            ..FleetEvents::default()
        };
        count
    }

    /// Runs until this number of sidecars has received the awaited type.
    pub(crate) fn wait(&mut self, count: usize, patience: Duration) -> anyhow::Result<()> {
        let deadline = clock::now() + nanoseconds(patience);
        while self.received.changed.len() < count {
            self.turn(deadline, deadline).with_context(|| {
                format!("{} of {count} sidecars have received the change", self.received.changed.len())
            })?;
        }
        Ok(())
    }

    /// Runs until a condition holds. Checks it at least every [`CHECK`].
    pub(crate) fn wait_until(&mut self, is_met: impl Fn() -> bool, patience: Duration) -> anyhow::Result<()> {
        let deadline = clock::now() + nanoseconds(patience);
        while !is_met() {
            self.turn(deadline.min(clock::now() + nanoseconds(CHECK)), deadline)?;
        }
        Ok(())
    }

    /// Runs for this duration.
    pub(crate) fn rest(&mut self, length: Duration) -> anyhow::Result<()> {
        let end = clock::now() + nanoseconds(length);
        while clock::now() < end {
            self.events(end)?;
        }
        Ok(())
    }

    fn open(&mut self, at: usize, numbers: &[usize]) -> anyhow::Result<()> {
        let began = clock::now();
        let namespace = self.plan.namespace(numbers.first().copied().unwrap_or_default());
        let tls = (!self.tls.is_empty()).then(|| &self.tls[namespace % self.tls.len()]);
        let stream = match tls {
            None => Stream::begin(&self.target.into(), None)?,
            Some(tls) => {
                let stream = Stream::open(self.target, Some(tls))?;
                stream.socket().set_nonblocking(true)?;
                stream
            }
        };
        let mut connection = Connection::new(stream, self.plan.form, numbers.len(), AUTHORITY, MAX_INSPECTED);
        let sidecars: Vec<Sidecar> = numbers.iter().copied().map(Sidecar::new).collect();
        for (call, sidecar) in sidecars.iter().enumerate() {
            self.message.clear();
            sidecar.begin(self.plan, &mut self.message);
            connection.send(call, &self.message);
        }
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT, at as u64);
        self.epoll.add(&connection, event)?;
        self.slots[at] = Some(Slot { connection, began, sidecars, blocked: true });
        Ok(())
    }

    /// Waits for events, until `until` at most, and handles them. Fails at the deadline.
    fn turn(&mut self, until: u64, deadline: u64) -> anyhow::Result<()> {
        self.events(until)?;
        if clock::now() >= deadline {
            bail!("the time is up");
        }
        Ok(())
    }

    fn events(&mut self, deadline: u64) -> anyhow::Result<()> {
        let left = deadline.saturating_sub(clock::now()) / 1_000_000;
        let timeout = EpollTimeout::from(u16::try_from(left + 1).unwrap_or(1_000).min(1_000));
        let mut events = [EpollEvent::empty(); 256];
        let count = match self.epoll.wait(&mut events, timeout) {
            Err(nix::errno::Errno::EINTR) => 0,
            other => other?,
        };
        for event in &events[..count] {
            let at = event.data() as usize;
            self.serve(at).with_context(|| self.name(at))?;
        }
        Ok(())
    }

    /// Returns the sidecars of a connection, for errors.
    fn name(&self, at: usize) -> String {
        let sidecars = self.slots.get(at).and_then(Option::as_ref).map_or(&[][..], |slot| &slot.sidecars);
        let numbers: Vec<String> = sidecars.iter().map(|sidecar| sidecar.number.to_string()).collect();
        format!("sidecar {}", numbers.join(", "))
    }

    /// Reads, answers and writes on one connection.
    fn serve(&mut self, at: usize) -> anyhow::Result<()> {
        let Some(Slot { connection, began, sidecars, blocked }) =
            self.slots.get_mut(at).and_then(Option::as_mut)
        else {
            return Ok(());
        };
        let (plan, received, message) = (self.plan, &mut self.received, &mut self.message);
        connection.read(&mut self.scratch, |connection, call, response| {
            let sidecar = &mut sidecars[call];
            let was = sidecar.is_configured(plan);
            message.clear();
            sidecar.answer(plan, &response, message)?;
            connection.send(call, message);
            let is_configured = !was && sidecar.is_configured(plan);
            received.note(*sidecar, is_configured, *began, response);
            Ok(())
        })?;
        let written = connection.flush()?;
        if written == *blocked {
            let mut flags = EpollFlags::EPOLLIN;
            flags.set(EpollFlags::EPOLLOUT, !written);
            self.epoll.modify(connection.as_fd(), &mut EpollEvent::new(flags, at as u64))?;
            *blocked = !written;
        }
        Ok(())
    }
}

impl FleetEvents {
    /// Returns the number of sidecars that have received a response since [`Fleet::begin_wait`].
    pub(crate) fn reached(&self) -> usize {
        self.reached.iter().filter(|is_reached| **is_reached).count()
    }

    fn note(&mut self, sidecar: Sidecar, is_configured: bool, began: u64, response: Response) {
        self.bytes += response.bytes;
        self.resources += u64::from(response.resources + response.removed);
        self.responses += 1;
        if let Some(is_reached) = self.reached.get_mut(sidecar.number) {
            *is_reached = true;
        }
        if is_configured {
            self.configured.push(clock::now() - began);
        }
        if let Some((kind, waiting)) = &mut self.wanted
            && response.kind == Some(*kind)
            && let Some(waits) = waiting.get_mut(sidecar.number).filter(|waits| **waits)
        {
            *waits = false;
            self.changed.push(clock::now());
        }
    }
}
