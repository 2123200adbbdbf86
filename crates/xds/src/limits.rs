//! What clients may cost a server: every bound in one place, and the accounts that keep to them.
//!
//! Memory is bounded by what a connection holds (requests that are not complete, names of resources that do not exist, streams) and by
//! never encoding more than its client takes. CPU time is bounded by a [pace](Pace): all that a client makes the server do is
//! charged to its connection, which is not read while it owes too much. `docs/limits.md` lists them for operators.
//!
//! What the replicas of an identity share never ends a request: it delays it. A replica is held up by what others spend only
//! after it has spent the share of a whole connection itself ([`Payer`]), and waits for [room] in turn.

mod pace;
mod room;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tonic::{
    Extensions, Status,
    transport::server::{TcpConnectInfo, TlsConnectInfo},
};
use tracing::warn;

use self::room::Room;
pub(crate) use self::{
    pace::Pace,
    room::{Reservation, SMALL},
};

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
/// Room for requests of more than 64 KiB that are not complete yet, of one workload instance. In bytes.
pub const INSTANCE_ROOM: usize = 8 << 20;
/// The same of all instances of an identity. In bytes.
pub const IDENTITY_ROOM: usize = 32 << 20;
/// The same of all. In bytes.
pub const ALL_ROOM: usize = 256 << 20;
/// Time for the rest of a request that has begun, without that in which it waits for the server.
pub const REST: Duration = Duration::from_secs(30);
/// Names that the streams of a connection ask for and that no resource has, as [`name_cost`] counts them: some 70,000 of a usual
/// length. Names of resources are held once for all clients and not counted. In bytes.
pub const NAMES: usize = 8 << 20;
/// Lists of names that the streams of a workload instance hold, 16 bytes for a name; a list that several streams share counts in
/// parts. Most streams hold what all others do, or a few hundred names. Leaves room for 64 streams that each list all of 60,000
/// services twice, as one does whose proxy has not followed all changes yet. In bytes.
pub const INSTANCE_LISTS: usize = 128 << 20;
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
/// An identity may cost as much as this many connections, however many it opens. An instance of it that has itself cost no more
/// than one connection may is not held up beyond that.
pub const IDENTITY_PACE: u64 = 64;
/// Cost of a byte that is not in a request, such as that of a PING or of a header.
pub const FRAME_BYTE: u64 = 16;
/// Cost of opening a call, aside from its header.
pub const CALL: u64 = 256 << 10;
/// Cost of a call that is refused after its caller has proved an identity: that of a request of the greatest length. It is charged to
/// the identity and the instance; the call itself was charged to its connection.
pub const REFUSAL: u64 = 4 << 20;
/// Bytes of an acknowledgement that cost nothing, aside from the names that one in the state of the world repeats.
pub const ACKNOWLEDGEMENT: usize = 512;
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
    room: Room,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(Duration::from_secs(60), 10_000, 64 << 20)
    }
}

/// What was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The connection owes too much, or the identity and the instance do, and is not read for a while.
    Pace,
    /// The client takes nothing of what waits for it.
    Unread,
    /// A request is too long, or has too many fields.
    Request,
    /// A request waits for room, or is not completed in time.
    Incomplete,
    /// The connection asks for too many names that no resource has, or the instance has too long lists of names.
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
        let (reached, identities, room) = Default::default();
        Self { unread, identity_streams, identity_names, reached, identities, room }
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
    /// A call has the place for a small request that is not complete.
    small: AtomicBool,
    waiting: AtomicUsize,
    /// Waits that have ended.
    waited: AtomicUsize,
    names: AtomicUsize,
    closing: AtomicBool,
    /// Bytes read from the client since its connection began.
    pub(crate) read: AtomicU64,
    /// Bytes written to it.
    pub(crate) written: AtomicU64,
}

impl Account {
    pub(crate) fn new(limits: Arc<Limits>, client: String) -> Self {
        let (pace, small, waiting, waited, names, closing, read, written) = Default::default();
        Self { limits, client, pace, small, waiting, waited, names, closing, read, written }
    }

    /// Has the connection closed without regard to its other calls.
    pub(crate) fn close(&self) {
        self.closing.store(true, Relaxed);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// How many waits of the connection's calls have ended; `None` while one waits. What such a call does not read fills the
    /// connection's window, and holds up the others.
    pub(crate) fn waited(&self) -> Option<usize> {
        (self.waiting.load(Relaxed) == 0).then(|| self.waited.load(Relaxed))
    }
}

/// A call's wait for room or for its pace, until it is dropped.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Account>);

impl Waiting {
    pub(crate) fn new(account: &Arc<Account>) -> Self {
        account.waiting.fetch_add(1, Relaxed);
        Self(Arc::clone(account))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waited.fetch_add(1, Relaxed);
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

/// The caller, proven before the body of the call is read.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The identity, which replicas of a workload share.
    pub name: Arc<str>,
    /// The workload instance that the credential was given to, if it says so.
    pub instance: Option<Arc<str>>,
}

/// The workload instance that makes a call: the one that its credential names, else all that have the client's address.
pub(crate) fn instance(extensions: &Extensions) -> Arc<str> {
    let proven = extensions.get::<Identity>().and_then(|identity| identity.instance.clone());
    proven.unwrap_or_else(|| {
        let tls = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref);
        let address = tls.or(extensions.get()).and_then(TcpConnectInfo::remote_addr);
        address.map_or_else(Arc::default, |address| address.ip().to_string().into())
    })
}

/// A place for a request that is arriving, until it is complete.
#[derive(Debug)]
pub(crate) enum Place {
    /// The one that each connection has.
    Small(Arc<Account>),
    /// One in the room that connections share; it may still be waited for.
    Shared(Reservation),
}

impl Place {
    /// The place for a request of so many bytes of an instance of an identity.
    pub(crate) fn of(account: &Arc<Account>, identity: &Arc<str>, instance: &Arc<str>, bytes: usize) -> Self {
        if bytes <= SMALL && !account.small.swap(true, Relaxed) {
            return Self::Small(Arc::clone(account));
        }
        Self::Shared(Reservation::new(&account.limits, identity, instance, bytes))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Self::Small(account) = self {
            account.small.store(false, Relaxed);
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
    /// Work for all its instances, also for streams that have ended.
    pace: Arc<Pace>,
    /// Work for each of them.
    instances: HashMap<Arc<str>, Arc<Instance>>,
}

/// What a workload instance has.
#[derive(Debug, Default)]
struct Instance {
    pace: Pace,
    /// Bytes of its streams' lists of names.
    lists: AtomicUsize,
}

impl Usage {
    fn is_used(&self) -> bool {
        self.streams > 0 || !self.instances.is_empty() || self.pace.owed() > 0
    }

    /// Forgets instances that have no calls and owe nothing.
    fn forget_instances(&mut self) {
        self.instances.retain(|_, instance| Arc::strong_count(instance) > 1 || instance.pace.owed() > 0);
    }
}

/// Above this number of identities, or of instances of one, those that have ended and owe nothing any more are looked for.
const MANY: usize = 1_024;

fn is_time_to_forget(count: usize) -> bool {
    count >= MANY && count.is_power_of_two()
}

/// Whom work is charged to besides the connection: an identity, and the workload instance of it that makes the call.
///
/// An identity that owes too much holds up those instances that owe too much as well. One instance cannot hold up the others, and
/// opening connections gains it nothing.
#[derive(Debug)]
pub(crate) struct Payer {
    limits: Arc<Limits>,
    identity: Arc<str>,
    instance: Arc<str>,
    of_identity: Arc<Pace>,
    of_instance: Arc<Instance>,
}

impl Payer {
    pub(crate) fn new(limits: &Arc<Limits>, identity: &Arc<str>, instance: &Arc<str>) -> Self {
        let mut identities = lock(&limits.identities);
        if is_time_to_forget(identities.len()) {
            identities.values_mut().for_each(Usage::forget_instances);
            identities.retain(|_, usage| usage.is_used());
        }
        let usage = identities.entry(Arc::clone(identity)).or_default();
        if is_time_to_forget(usage.instances.len()) {
            usage.forget_instances();
        }
        let of_identity = Arc::clone(&usage.pace);
        let of_instance = Arc::clone(usage.instances.entry(Arc::clone(instance)).or_default());
        let (identity, instance) = (Arc::clone(identity), Arc::clone(instance));
        Self { limits: Arc::clone(limits), identity, instance, of_identity, of_instance }
    }

    /// Charges for something.
    pub(crate) fn spend(&self, units: u64) {
        self.of_identity.spend(units / IDENTITY_PACE);
        self.of_instance.pace.spend(units);
    }

    /// How long to wait before more is done; `None` if there is no need to.
    pub(crate) fn wait(&self) -> Option<Duration> {
        Some(self.of_identity.wait()?.min(self.of_instance.pace.wait()?))
    }
}

impl Drop for Payer {
    fn drop(&mut self) {
        let mut identities = lock(&self.limits.identities);
        let Some(usage) = identities.get_mut(&self.identity) else { return };
        // The map has one, and this the other.
        if Arc::strong_count(&self.of_instance) == 2 && self.of_instance.pace.owed() == 0 {
            usage.instances.remove(&self.instance);
        }
        if !usage.is_used() {
            identities.remove(&self.identity);
        }
    }
}

/// A stream's place in the accounts of its connection and its identity, until it ends.
#[derive(Debug)]
pub(crate) struct Member {
    account: Arc<Account>,
    payer: Arc<Payer>,
    names: usize,
    lists: usize,
}

impl Member {
    /// Counts one more stream of an identity; fails if there are too many.
    pub(crate) fn enter(account: Arc<Account>, payer: Payer) -> Result<Self, Status> {
        let limits = &account.limits;
        let mut identities = lock(&limits.identities);
        let usage = identities.entry(Arc::clone(&payer.identity)).or_default();
        if usage.streams < limits.identity_streams {
            usage.streams += 1;
            drop(identities);
            payer.spend(CALL);
            return Ok(Self { account, payer: Arc::new(payer), names: 0, lists: 0 });
        }
        let streams = usage.streams;
        drop(identities);
        let what = format!("{} has {streams} discovery streams, which is the limit", payer.identity);
        Err(limits.exhausted(Bound::IdentityStreams, &account.client, what))
    }

    /// Charges a request of so many bytes, of which some are `free`. The connection has paid for all of them; the identity and its
    /// instance have not.
    pub(crate) fn spend(&self, units: u64, bytes: usize, free: usize) {
        let free = free.min(bytes);
        self.account.pace.refund(free as u64);
        self.account.pace.spend(units);
        self.payer.spend(units + (bytes - free) as u64);
    }

    pub(crate) fn payer(&self) -> &Arc<Payer> {
        &self.payer
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
            let usage = identities.entry(Arc::clone(&self.payer.identity)).or_default();
            usage.names = usage.names - before + names;
            usage.names
        };
        let (bound, whose, most) = match () {
            () if of_connection > NAMES => (Bound::Names, "this connection", NAMES),
            () if of_identity > limits.identity_names => {
                (Bound::IdentityNames, &*self.payer.identity, limits.identity_names)
            }
            () => return Ok(()),
        };
        let what = format!("the names that {whose} asks for and no resource has take more than {most} bytes");
        Err(limits.exhausted(bound, &self.account.client, what))
    }
}

impl Member {
    /// Sets the length of the stream's lists of names; fails if the streams of its instance have too much of them.
    pub(crate) fn lists(&mut self, bytes: usize) -> Result<(), Status> {
        if bytes == self.lists {
            return Ok(());
        }
        let all = exchange(&self.payer.of_instance.lists, &mut self.lists, bytes);
        if all <= INSTANCE_LISTS {
            return Ok(());
        }
        let what = format!(
            "the lists of names that the streams of this workload instance ask for take {all} bytes; {INSTANCE_LISTS} is the limit"
        );
        Err(self.account.limits.exhausted(Bound::Names, &self.account.client, what))
    }

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
        self.payer.of_instance.lists.fetch_sub(self.lists, Relaxed);
        let mut identities = lock(&self.account.limits.identities);
        if let Some(usage) = identities.get_mut(&self.payer.identity) {
            usage.streams -= 1;
            usage.names -= self.names;
        }
    }
}

// All that is behind these locks is whole at any moment, so also after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(limits: &Arc<Limits>, identity: &str, instance: &str) -> Result<Member, Status> {
        let account = Arc::new(Account::new(Arc::clone(limits), "test".into()));
        Member::enter(account, Payer::new(limits, &identity.into(), &instance.into()))
    }

    #[test]
    fn an_identity_pays_for_the_connections_that_it_has_closed() {
        let limits = Arc::new(Limits::default());
        for _ in 0..2 * IDENTITY_PACE {
            let member = enter(&limits, "a", "1").unwrap();
            // The rest of what it owes is not forgiven with the connection.
            member.spend(BURST, 0, 0);
        }
        let member = enter(&limits, "a", "1").unwrap();
        assert_eq!(member.account.pace.wait(), None, "the connection owes nothing");
        let wait = member.payer.wait().unwrap();
        assert!(wait > Duration::from_secs(60), "{wait:?}");
    }

    #[test]
    fn an_instance_that_spends_its_identity_s_pace_holds_up_itself_alone() {
        let limits = Arc::new(Limits::default());
        let evil = enter(&limits, "a", "evil").unwrap();
        evil.spend(2 * IDENTITY_PACE * BURST, 0, 0);
        let replica = enter(&limits, "a", "good").unwrap();
        replica.spend(BURST - CALL, 0, 0);
        assert!(evil.payer.wait().is_some());
        assert_eq!(replica.payer.wait(), None, "a replica may cost what one connection may");
        replica.spend(RATE * 60, 0, 0);
        assert!(
            replica.payer.wait().is_some_and(|wait| wait <= Duration::from_millis(60_001)),
            "and no more"
        );
        assert_eq!(enter(&limits, "b", "evil").unwrap().payer.wait(), None);
    }

    #[test]
    fn an_instance_may_use_all_that_its_identity_has_left() {
        let limits = Arc::new(Limits::default());
        let member = enter(&limits, "a", "1").unwrap();
        member.spend(IDENTITY_PACE * (BURST - CALL), 0, 0);
        assert_eq!(member.payer.wait(), None);
    }

    #[test]
    fn only_the_free_bytes_of_a_request_are_paid_back() {
        // So many that what leaks away meanwhile does not matter.
        const BYTES: usize = 1 << 50;
        let owed = |bytes: usize, free| {
            let member = enter(&Arc::default(), "a", "1").unwrap();
            member.account.pace.spend(bytes as u64);
            member.spend(0, bytes, free);
            [member.account.pace.owed(), member.payer.of_instance.pace.owed()].map(|owed| owed > 1 << 49)
        };
        assert_eq!(owed(BYTES, ACKNOWLEDGEMENT), [true, true]);
        assert_eq!(owed(BYTES, BYTES), [false, false]);
        assert_eq!(owed(BYTES, usize::MAX), [false, false]);
    }

    #[test]
    fn lists_of_names_are_counted_for_the_instance() {
        let limits = Arc::new(Limits::default());
        let mut members: Vec<_> = (0..2).map(|_| enter(&limits, "a", "1").unwrap()).collect();
        members[0].lists(INSTANCE_LISTS - 16).unwrap();
        members[1].lists(16).unwrap();
        assert_eq!(members[1].lists(32).unwrap_err().code(), tonic::Code::ResourceExhausted);
        enter(&limits, "a", "2").unwrap().lists(INSTANCE_LISTS).unwrap();
        drop(members.remove(0));
        members[0].lists(INSTANCE_LISTS).unwrap();
        assert_eq!(limits.reached(Bound::Names), 1);
    }

    #[test]
    fn identities_and_instances_that_owe_nothing_are_forgotten() {
        let limits = Arc::new(Limits::default());
        let of = |instance: &str| Payer::new(&limits, &"a".into(), &instance.into());
        let (one, same, other) = (of("1"), of("1"), of("2"));
        let instances = || lock(&limits.identities).get("a").map_or(0, |usage| usage.instances.len());
        drop(one);
        assert_eq!(instances(), 2, "another call of it goes on");
        drop(same);
        assert_eq!(instances(), 1);
        other.of_instance.pace.spend(BURST);
        drop(other);
        assert_eq!(instances(), 1, "it still owes");
        // What has come to owe nothing by itself is looked for when there are many.
        lock(&limits.identities)["a"].instances["2"].pace.refund(BURST);
        let many: Vec<_> = (0..MANY).map(|instance| of(&format!("many-{instance}"))).collect();
        assert_eq!(instances(), MANY);
        drop(many);
        assert!(lock(&limits.identities).is_empty());
    }

    #[test]
    fn streams_and_names_are_counted_by_connection_and_identity() {
        let limits = Limits { identity_streams: 2, identity_names: NAMES + 100, ..Limits::default() };
        let limits = Arc::new(limits);
        let connection = || Arc::new(Account::new(Arc::clone(&limits), "test".into()));
        let (one, other) = (connection(), connection());
        let enter = |account: &Arc<Account>, who: &str| {
            Member::enter(Arc::clone(account), Payer::new(&limits, &who.into(), &"1".into()))
        };
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
