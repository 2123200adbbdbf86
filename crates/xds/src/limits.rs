//! What clients may cost a server: every bound in one place, and the accounts that keep to them.
//!
//! Memory is bounded by what a connection holds (requests that are not complete, names of resources that do not exist, streams) and by
//! never encoding more than its client takes. CPU time is bounded by a [pace](Pace): all that a client makes the server do is
//! charged to its connection, which is not read while it owes too much. `docs/limits.md` lists them for operators.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tonic::Status;
use tracing::warn;

/// Calls in progress on a connection. A proxy has one stream, and now and then a call for a certificate.
pub const CALLS: u32 = 16;
/// Length of a call's header list, which has a token in it. In bytes.
pub const HEAD: u32 = 32 << 10;
/// Length of a discovery request: the names of some hundred thousand resources. In bytes.
pub const REQUEST: usize = 4 << 20;
/// Fields of a request, most of which are names. An empty one takes two bytes on the wire and a hundred in memory.
pub const FIELDS: usize = 250_000;
/// Length of the node in a stream's first request, annotations included, of which Kubernetes allows 256 KiB. In bytes.
pub const NODE: usize = 512 << 10;
/// Requests of a connection that are not complete yet, together. In bytes.
pub const INCOMPLETE: usize = 8 << 20;
/// The same of all connections of an identity. In bytes.
pub const IDENTITY_INCOMPLETE: usize = 32 << 20;
/// The same of all connections. In bytes.
pub const ALL_INCOMPLETE: usize = 256 << 20;
/// Time for the rest of a request that has begun, without that in which its connection is not read.
pub const REST: Duration = Duration::from_secs(30);
/// Names that the streams of a connection ask for and that no resource has, as [`name_cost`] counts them: some 70,000 of a usual
/// length. Names of resources are held once for all clients and not counted. In bytes.
pub const NAMES: usize = 8 << 20;
/// Names of virtual hosts that a stream asks for and that no resource has. After many changes of domains at once all of them are
/// looked up again; a proxy asks for 1,000 at most.
pub const AUTHORITIES: usize = 2_048;
/// What is kept, shown and logged of the reason for which a client refuses a response. In bytes.
pub const REASON: usize = 1 << 10;
/// Encoded for a stream and not yet written, at most. In bytes.
pub const UNSENT: usize = 512 << 10;
/// A client that does not read must take this much, or all that waits for it, within [`Limits::unread`]. In bytes.
pub const PROGRESS: usize = 64 << 10;

/// What a connection may owe before it is read no more, in units of the costs below: a first request for all of 60,000 services.
pub const BURST: u64 = 128 << 20;
/// What a connection may cost in the long run, in units a second.
pub const RATE: u64 = 256 << 10;
/// An identity may cost as much as this many connections, however many it opens.
pub const IDENTITY_PACE: u64 = 64;
/// Cost of a byte that is not in a request, such as that of a PING or of a header.
pub const FRAME_BYTE: u64 = 16;
/// Cost of opening a call, aside from its header.
pub const CALL: u64 = 256 << 10;
/// Cost of a request that is more than an acknowledgement, aside from its bytes, which cost one each.
pub const ASK: u64 = 1 << 10;
/// Cost of a resource that a request asks for anew.
pub const RESOURCE: u64 = 256;
/// Cost of a name or version in a request, aside from its bytes.
pub const NAMED: u64 = 64;
/// Cost of a name that a stream holds, or is to be answered, when it changes what it asks for.
pub const HELD: u64 = 2;
/// Cost of looking up what answers to an authority: one for its domain, and one for each `*.suffix` of it.
pub const LOOKUP: u64 = 32;

/// Bounds that an operator may need to raise, and how often each was reached.
#[derive(Debug)]
pub struct Limits {
    /// How long a client may take nothing while something waits for it, before its connection is closed.
    pub unread: Duration,
    /// Streams of one identity.
    pub identity_streams: usize,
    /// Like [`NAMES`], of all connections of one identity. In bytes.
    pub identity_names: usize,
    reached: [Reached; Bound::ALL.len()],
    identities: Mutex<HashMap<Arc<str>, Usage>>,
    /// Bytes of incomplete requests of all connections.
    incomplete: AtomicUsize,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(Duration::from_secs(60), 10_000, 64 << 20)
    }
}

/// What was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The connection owes too much and is not read for a while.
    Pace,
    /// The client takes nothing of what waits for it.
    Unread,
    /// A request is too long, or has too many fields.
    Request,
    /// The connection, its identity or all together have too many bytes of incomplete requests, or one is not completed in time.
    Incomplete,
    /// The connection asks for too many names that no resource has.
    Names,
    /// The identity does.
    IdentityNames,
    /// The identity has too many streams.
    IdentityStreams,
    /// A nonce that the stream was never sent.
    Nonce,
}

impl Bound {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Pace,
        Self::Unread,
        Self::Request,
        Self::Incomplete,
        Self::Names,
        Self::IdentityNames,
        Self::IdentityStreams,
        Self::Nonce,
    ];

    /// Its label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pace => "pace",
            Self::Unread => "unread",
            Self::Request => "request",
            Self::Incomplete => "incomplete",
            Self::Names => "names",
            Self::IdentityNames => "identity_names",
            Self::IdentityStreams => "identity_streams",
            Self::Nonce => "nonce",
        }
    }
}

/// How often a bound was reached.
#[derive(Debug, Default)]
struct Reached {
    count: AtomicU64,
    /// The count at the last log line, and when that was.
    logged: Mutex<Option<(u64, Instant)>>,
}

/// Between two log lines about one bound.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

impl Limits {
    /// Limits of these values, which are those of the fields.
    pub fn new(unread: Duration, identity_streams: usize, identity_names: usize) -> Self {
        let (reached, identities, incomplete) = Default::default();
        Self { unread, identity_streams, identity_names, reached, identities, incomplete }
    }

    /// How often a bound was reached.
    pub fn reached(&self, bound: Bound) -> u64 {
        self.reached[bound as usize].count.load(Relaxed)
    }

    /// Counts that `client` reached a bound, and logs it at most every ten seconds.
    pub(crate) fn note(&self, bound: Bound, client: &str) {
        let Reached { count, logged } = &self.reached[bound as usize];
        let count = count.fetch_add(1, Relaxed) + 1;
        let mut logged = lock(logged);
        let before = match &*logged {
            Some((_, at)) if at.elapsed() < BETWEEN_LINES => return,
            Some((before, _)) => *before,
            None => 0,
        };
        *logged = Some((count, Instant::now()));
        drop(logged);
        warn!(bound = bound.label(), times = count - before, client, "a client reached a limit of discovery");
    }

    /// Counts that a bound was reached, and makes the status that ends the call.
    pub(crate) fn exhausted(&self, bound: Bound, client: &str, what: impl Into<String>) -> Status {
        self.note(bound, client);
        Status::resource_exhausted(what)
    }
}

/// What a name costs that is held for one client alone: its bytes, their allocation, and its places in lists. In bytes.
pub(crate) fn name_cost(name: &str) -> usize {
    64 + name.len()
}

/// What a connection's calls share.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) limits: Arc<Limits>,
    /// Whose it is, for the log.
    pub(crate) client: String,
    pub(crate) pace: Pace,
    incomplete: AtomicUsize,
    names: AtomicUsize,
    closing: AtomicBool,
}

impl Account {
    pub(crate) fn new(limits: Arc<Limits>, client: String) -> Self {
        let (incomplete, names, closing) = Default::default();
        Self { limits, client, pace: Pace::default(), incomplete, names, closing }
    }

    /// Has the connection closed without regard to its other calls.
    pub(crate) fn close(&self) {
        self.closing.store(true, Relaxed);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Waits until the connection owes little enough to go on.
    pub(crate) async fn paced(&self) {
        self.paced_by(&self.pace).await;
    }

    async fn paced_by(&self, pace: &Pace) {
        while let Some(wait) = pace.wait() {
            self.limits.note(Bound::Pace, &self.client);
            tokio::time::sleep(wait).await;
        }
    }
}

/// Who makes a call, where that is proven before anything of its body is read.
#[derive(Clone, Debug)]
pub struct Identity(pub Arc<str>);

/// Bytes of incomplete requests that a call is charged for, until it ends.
#[derive(Debug)]
pub(crate) struct Incomplete {
    account: Arc<Account>,
    identity: Option<Arc<str>>,
    bytes: usize,
}

impl Incomplete {
    pub(crate) fn new(account: Arc<Account>, identity: Option<Identity>) -> Self {
        Self { account, identity: identity.map(|Identity(name)| name), bytes: 0 }
    }

    /// Sets how many there are now; fails if those of the connection, of its identity or of all are too many.
    pub(crate) fn set(&mut self, bytes: usize) -> Result<(), Status> {
        if bytes == self.bytes {
            return Ok(());
        }
        let [of_connection, of_identity, of_all] = self.exchange(bytes);
        let (all, whose, most) = match () {
            () if of_connection > INCOMPLETE => (of_connection, "on this connection", INCOMPLETE),
            () if of_identity > IDENTITY_INCOMPLETE => (of_identity, "of this identity", IDENTITY_INCOMPLETE),
            () if of_all > ALL_INCOMPLETE => (of_all, "of all connections", ALL_INCOMPLETE),
            () => return Ok(()),
        };
        let what = format!("incomplete requests {whose} take {all} bytes; {most} is the limit");
        Err(self.account.limits.exhausted(Bound::Incomplete, &self.account.client, what))
    }

    /// Sets how many there are now, and returns those of the connection, of its identity and of all.
    fn exchange(&mut self, bytes: usize) -> [usize; 3] {
        let before = self.bytes;
        let limits = &self.account.limits;
        let of_connection = exchange(&self.account.incomplete, &mut self.bytes, bytes);
        let of_all = exchange(&limits.incomplete, &mut { before }, bytes);
        let of_identity = self.identity.as_ref().map_or(0, |identity| {
            let mut identities = lock(&limits.identities);
            let usage = identities.entry(Arc::clone(identity)).or_default();
            usage.incomplete = usage.incomplete - before + bytes;
            let of_identity = usage.incomplete;
            forget(&mut identities, identity);
            of_identity
        });
        [of_connection, of_identity, of_all]
    }
}

impl Drop for Incomplete {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.exchange(0);
        }
    }
}

/// Replaces a part of a sum, and gives the sum.
fn exchange(sum: &AtomicUsize, part: &mut usize, now: usize) -> usize {
    let before = std::mem::replace(part, now);
    if now >= before {
        sum.fetch_add(now - before, Relaxed) + (now - before)
    } else {
        sum.fetch_sub(before - now, Relaxed) - (before - now)
    }
}

/// What an identity has.
#[derive(Debug, Default)]
struct Usage {
    streams: usize,
    names: usize,
    incomplete: usize,
    /// Work for all its streams, also for those that have ended.
    pace: Arc<Pace>,
}

/// Forgets an identity that has nothing and owes nothing.
fn forget(identities: &mut HashMap<Arc<str>, Usage>, identity: &str) {
    let unused = |usage: &Usage| usage.streams == 0 && usage.incomplete == 0 && usage.pace.owed() == 0;
    if identities.get(identity).is_some_and(unused) {
        identities.remove(identity);
    }
}

/// Above this number of identities those that have ended and owe nothing any more are looked for.
const MANY: usize = 1_024;

/// A stream's place in the accounts of its connection and its identity, until it ends.
#[derive(Debug)]
pub(crate) struct Member {
    account: Arc<Account>,
    identity: Arc<str>,
    pace: Arc<Pace>,
    names: usize,
}

impl Member {
    /// Counts one more stream of an identity; fails if there are too many.
    pub(crate) fn enter(account: Arc<Account>, identity: Arc<str>) -> Result<Self, Status> {
        let limits = &account.limits;
        let mut identities = lock(&limits.identities);
        if identities.len() > MANY && identities.len().is_power_of_two() {
            let owes = |usage: &Usage| usage.pace.owed() > 0;
            identities.retain(|_, usage| usage.streams > 0 || usage.incomplete > 0 || owes(usage));
        }
        let usage = identities.entry(Arc::clone(&identity)).or_default();
        if usage.streams < limits.identity_streams {
            usage.streams += 1;
            let pace = Arc::clone(&usage.pace);
            drop(identities);
            pace.spend(CALL / IDENTITY_PACE);
            return Ok(Self { account, identity, pace, names: 0 });
        }
        let streams = usage.streams;
        drop(identities);
        let what = format!("{identity} has {streams} discovery streams, which is the limit");
        Err(limits.exhausted(Bound::IdentityStreams, &account.client, what))
    }

    /// Charges a request to the connection, which has paid for its bytes, and to the identity, which has not.
    pub(crate) fn spend(&self, units: u64, bytes: usize) {
        self.account.pace.spend(units);
        self.pace.spend((units + bytes as u64) / IDENTITY_PACE);
    }

    /// Whether the identity owes too much.
    pub(crate) fn owes(&self) -> bool {
        self.pace.wait().is_some()
    }

    /// Waits until the identity owes little enough to go on.
    pub(crate) async fn paced(&self) {
        self.account.paced_by(&self.pace).await;
    }

    /// Says what the names cost that the stream holds for itself; fails if that is too much for its connection or identity.
    pub(crate) fn holds(&mut self, names: usize) -> Result<(), Status> {
        if names == self.names {
            return Ok(());
        }
        let before = self.names;
        let limits = &self.account.limits;
        let of_connection = exchange(&self.account.names, &mut self.names, names);
        let of_identity = {
            let mut identities = lock(&limits.identities);
            let usage = identities.entry(Arc::clone(&self.identity)).or_default();
            usage.names = usage.names - before + names;
            usage.names
        };
        let (bound, whose, most) = match () {
            () if of_connection > NAMES => (Bound::Names, "this connection", NAMES),
            () if of_identity > limits.identity_names => {
                (Bound::IdentityNames, &*self.identity, limits.identity_names)
            }
            () => return Ok(()),
        };
        let what = format!("the names that {whose} asks for and no resource has take more than {most} bytes");
        Err(limits.exhausted(bound, &self.account.client, what))
    }
}

impl Member {
    /// Fails if its stream asks for so many names of virtual hosts that are no resource's.
    pub(crate) fn asks(&self, authorities: usize) -> Result<(), Status> {
        if authorities <= AUTHORITIES {
            return Ok(());
        }
        let what = format!(
            "the stream asks for {authorities} names that no virtual host has; {AUTHORITIES} is the limit"
        );
        Err(self.account.limits.exhausted(Bound::Names, &self.account.client, what))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.account.names.fetch_sub(self.names, Relaxed);
        let mut identities = lock(&self.account.limits.identities);
        if let Some(usage) = identities.get_mut(&self.identity) {
            usage.streams -= 1;
            usage.names -= self.names;
        }
        forget(&mut identities, &self.identity);
    }
}

/// A leaky bucket of [`BURST`] that empties at [`RATE`].
#[derive(Debug)]
pub(crate) struct Pace(Mutex<Owed>);

#[derive(Debug)]
struct Owed {
    units: u64,
    /// Up to when it has emptied.
    since: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self(Mutex::new(Owed { units: 0, since: Instant::now() }))
    }
}

impl Pace {
    /// Charges for something.
    pub(crate) fn spend(&self, units: u64) {
        lock(&self.0).spend(units, Instant::now());
    }

    /// Takes back a charge.
    pub(crate) fn refund(&self, units: u64) {
        let mut owed = lock(&self.0);
        owed.units = owed.units.saturating_sub(units);
    }

    /// What is owed now.
    fn owed(&self) -> u64 {
        let mut owed = lock(&self.0);
        owed.leak(Instant::now());
        owed.units
    }

    /// How long to wait before more is done; `None` if there is no need to.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let mut owed = lock(&self.0);
        if owed.units <= BURST {
            return None;
        }
        owed.leak(Instant::now());
        let over = owed.units.checked_sub(BURST).filter(|over| *over > 0)?;
        // Rounded up to a timer's milliseconds.
        Some(Duration::from_millis(over * 1_000 / RATE + 1))
    }
}

/// Nanoseconds in a second.
const NANOS: u128 = 1_000_000_000;

impl Owed {
    /// Charges for something, after what has leaked: time before a debt does not count towards it.
    fn spend(&mut self, units: u64, now: Instant) {
        self.leak(now);
        self.units = self.units.saturating_add(units);
    }

    fn leak(&mut self, now: Instant) {
        let nanos = u64::try_from(now.saturating_duration_since(self.since).as_nanos()).unwrap_or(u64::MAX);
        let leaked = u64::try_from(u128::from(nanos) * u128::from(RATE) / NANOS).unwrap_or(u64::MAX);
        if leaked >= self.units {
            (self.units, self.since) = (0, now);
            return;
        }
        self.units -= leaked;
        // The time of a part of a unit is left for the next look, or frequent ones would empty nothing.
        let counted = (u128::from(leaked) * NANOS).div_ceil(u128::from(RATE));
        self.since += Duration::from_nanos(u64::try_from(counted).unwrap_or(u64::MAX));
    }
}

// All that is behind these locks is whole at any moment, so also after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(limits: Limits) -> Arc<Account> {
        Arc::new(Account::new(Arc::new(limits), "test".into()))
    }

    #[test]
    fn a_pace_allows_a_burst_and_then_a_rate() {
        let mut owed = Owed { units: BURST + RATE, since: Instant::now() };
        let start = owed.since;
        owed.leak(start + Duration::from_millis(250));
        assert_eq!(owed.units, BURST + RATE * 3 / 4);
        owed.leak(start + Duration::from_millis(1_000));
        assert_eq!(owed.units, BURST);
        owed.leak(start + Duration::from_secs(3_600));
        assert_eq!(owed.units, 0, "an hour's rest earns no more than the burst");

        // Nor does a rest before the debt earn another.
        let mut owed = Owed { units: 0, since: start };
        let rested = start + Duration::from_secs(3_600);
        owed.spend(BURST, rested);
        owed.spend(BURST, rested);
        owed.leak(rested);
        assert_eq!(owed.units, 2 * BURST);
        // However often it is looked at.
        let mut owed = Owed { units: BURST, since: start };
        (1..=1_000_000).for_each(|micros| owed.leak(start + Duration::from_micros(micros)));
        assert!(owed.units.abs_diff(BURST - RATE) <= RATE / 1_000, "{}", owed.units);

        let pace = Pace::default();
        pace.spend(BURST);
        assert_eq!(pace.wait(), None);
        pace.spend(RATE * 60);
        let wait = pace.wait().unwrap();
        assert!(wait <= Duration::from_millis(60_001), "{wait:?}");
        pace.refund(RATE * 60);
        assert_eq!(pace.wait(), None);
    }

    #[test]
    fn incomplete_requests_are_counted_across_the_calls_of_a_connection() {
        let account = account(Limits::default());
        let mut calls: Vec<_> = (0..2).map(|_| Incomplete::new(Arc::clone(&account), None)).collect();
        assert!(calls[0].set(INCOMPLETE / 2).is_ok() && calls[1].set(INCOMPLETE / 2).is_ok());
        assert_eq!(calls[1].set(INCOMPLETE / 2 + 1).unwrap_err().code(), tonic::Code::ResourceExhausted);
        drop(calls.remove(0));
        assert!(calls[0].set(INCOMPLETE).is_ok());
        drop(calls);
        assert_eq!(account.incomplete.load(Relaxed), 0);
        assert_eq!(account.limits.reached(Bound::Incomplete), 1);
    }

    #[test]
    fn incomplete_requests_are_counted_across_the_connections_of_an_identity_and_of_all() {
        let limits = Arc::new(Limits::default());
        let begun = |identity: Option<&str>| {
            let account = Arc::new(Account::new(Arc::clone(&limits), "test".into()));
            let mut begun = Incomplete::new(account, identity.map(|name| Identity(name.into())));
            begun.set(INCOMPLETE).map(|()| begun)
        };
        let message = |identity| begun(identity).unwrap_err().message().to_owned();
        let mut held: Vec<_> =
            (0..IDENTITY_INCOMPLETE / INCOMPLETE).map(|_| begun(Some("a")).unwrap()).collect();
        assert!(message(Some("a")).starts_with("incomplete requests of this identity take"));
        assert!(begun(Some("b")).is_ok(), "another identity is not held up");
        held.extend((held.len()..ALL_INCOMPLETE / INCOMPLETE).map(|_| begun(None).unwrap()));
        assert!(message(Some("b")).starts_with("incomplete requests of all connections take"));
        assert_eq!(limits.incomplete.load(Relaxed), ALL_INCOMPLETE, "what is refused is not held");
        drop(held);
        assert_eq!(limits.incomplete.load(Relaxed), 0);
        assert!(lock(&limits.identities).is_empty());
    }

    #[test]
    fn an_identity_pays_for_the_connections_that_it_has_closed() {
        let limits = Arc::new(Limits::default());
        let enter = || {
            let account = Arc::new(Account::new(Arc::clone(&limits), "test".into()));
            Member::enter(account, "a".into()).unwrap()
        };
        for _ in 0..2 * IDENTITY_PACE {
            let member = enter();
            // The rest of what it owes is not forgiven with the connection.
            member.spend(BURST, 0);
        }
        let member = enter();
        assert_eq!(member.account.pace.wait(), None, "the connection owes nothing");
        let wait = member.pace.wait().unwrap();
        assert!(wait > Duration::from_secs(60), "{wait:?}");
    }

    #[test]
    fn streams_and_names_are_counted_by_connection_and_identity() {
        let limits = Limits { identity_streams: 2, identity_names: NAMES + 100, ..Limits::default() };
        let limits = Arc::new(limits);
        let connection = || Arc::new(Account::new(Arc::clone(&limits), "test".into()));
        let (one, other) = (connection(), connection());
        let enter = |account: &Arc<Account>, who: &str| Member::enter(Arc::clone(account), who.into());
        let (mut first, mut second) = (enter(&one, "a").unwrap(), enter(&other, "a").unwrap());
        assert_eq!(enter(&one, "a").unwrap_err().code(), tonic::Code::ResourceExhausted);
        let mut of_other_identity = enter(&one, "b").unwrap();

        first.holds(NAMES).unwrap();
        assert!(
            of_other_identity.holds(1).unwrap_err().message().starts_with("the names that this connection")
        );
        of_other_identity.holds(0).unwrap();
        second.holds(100).unwrap();
        assert!(second.holds(101).unwrap_err().message().starts_with("the names that a asks"));
        first.holds(0).unwrap();
        assert!(second.holds(101).is_ok());

        drop((first, second, of_other_identity));
        let identities = lock(&limits.identities);
        assert!(identities.values().all(|usage| usage.streams == 0 && usage.names == 0));
        drop(identities);
        assert_eq!(one.names.load(Relaxed), 0);
        let reached = Bound::ALL.map(|bound| limits.reached(bound));
        assert_eq!(reached, [0, 0, 0, 0, 1, 1, 1, 0]);
    }
}
