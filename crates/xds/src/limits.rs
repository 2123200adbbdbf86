//! Limits of the memory and CPU time that clients may use in a server, and the accounts that enforce them.
//!
//! Memory: limits apply to each kind of data that a connection holds: incomplete requests, names of resources
//! that do not exist, streams. The server encodes no more responses than the client reads.
//!
//! CPU time: all work that a client causes is charged to its connection ([`LeakyBucket`]). The server does not read
//! from a connection that owes too much. `docs/limits.md` lists the limits for operators.
//!
//! A limit that the replicas of an identity share only delays a request; it never ends one. Work of other
//! replicas delays a replica only after the replica itself has spent the allowance of one connection
//! ([`CallerAccount`]). Replicas take turns for [`memory`].

mod leaky_bucket;
mod memory;

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

use self::memory::SharedMemory;
pub(crate) use self::{
    leaky_bucket::LeakyBucket,
    memory::{Reservation, SMALL},
};

/// Maximum number of calls in progress per connection. A proxy has one stream, and sometimes a call for a
/// certificate.
pub const MAX_CALLS: u32 = 16;
/// Maximum length of the header list of a call, which carries a token, in bytes.
pub const MAX_HEAD: u32 = 32 << 10;
/// Maximum length of a discovery request in bytes: the names of about a hundred thousand resources.
pub const MAX_REQUEST: usize = 4 << 20;
/// Maximum number of fields of a request, most of which are names. An empty field takes two bytes on the wire
/// and a hundred in memory.
pub const MAX_FIELDS: usize = 250_000;
/// Maximum length of the node in the first request of a stream, in bytes. It includes annotations, of which
/// Kubernetes allows 256 KiB.
pub const MAX_NODE: usize = 512 << 10;
/// Memory for incomplete requests of more than 64 KiB, per workload instance, in bytes.
pub const INSTANCE_MEMORY: usize = 8 << 20;
/// Memory for these requests per identity, in bytes.
pub const IDENTITY_MEMORY: usize = 32 << 20;
/// Memory for these requests in total, in bytes.
pub const TOTAL_MEMORY: usize = 256 << 20;
/// Timeout for the rest of a request that has begun. The time in which the server does not read the
/// connection does not count.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Memory for names of resources that do not exist, in the subscriptions of one connection, in bytes. It
/// suffices for about 70,000 names of usual length, as [`name_cost`] counts them. Names of existing resources
/// are held once for all clients and are not counted.
pub const MAX_NAMES: usize = 8 << 20;
/// Memory for the lists of names in the streams of a workload instance, in bytes, 16 per name. Streams that
/// share a list divide its bytes among them. Most streams hold either the list that all others hold, or a few
/// hundred names. The limit allows 64 streams that each list all of 60,000 services twice. A stream lists
/// them twice while its proxy has not acknowledged all changes.
pub const MAX_INSTANCE_LISTS: usize = 128 << 20;
/// Maximum number of virtual host names of a stream for which no resource exists. Many simultaneous changes
/// of domains cause the server to resolve all of them again. A proxy subscribes to 1,000 at most.
pub const MAX_AUTHORITIES: usize = 2_048;
/// Maximum length of the reason of a NACK that is kept, shown and logged, in bytes.
pub const MAX_REASON: usize = 1 << 10;
/// Number of bytes that a slow client must read within [`Limits::unread`], unless fewer are pending and it
/// reads all of them.
pub const MIN_PROGRESS: usize = 64 << 10;

/// Maximum debt of a connection that the server reads, in units of the costs below. It allows a first request for
/// all of 60,000 services.
pub const BURST: u64 = 128 << 20;
/// Rate at which a connection pays its debt, in units per second.
pub const RATE: u64 = 256 << 10;
/// Rate and burst of an identity, as a multiple of those of one connection. They do not depend on the number
/// of its connections. An instance whose work is within the limits of one connection is not delayed.
pub const IDENTITY_FACTOR: u64 = 64;
/// Cost of a byte outside of requests, for example in a PING or a header.
pub const FRAME_BYTE_COST: u64 = 16;
/// Cost of a call, without its headers.
pub const CALL_COST: u64 = 256 << 10;
/// Cost of a call that is refused after its caller has proved an identity: the cost of a request of maximum
/// length. The identity and the instance pay it. The connection pays for the call itself.
pub const REFUSAL_COST: u64 = 4 << 20;
/// Number of bytes of an acknowledgement that cost nothing. The names that a state-of-the-world
/// acknowledgement repeats are free in addition.
pub const FREE_ACKNOWLEDGEMENT: usize = 512;
/// Cost of a request that is more than an acknowledgement. Each of its bytes costs one unit in addition.
pub const REQUEST_COST: u64 = 1 << 10;
/// Cost of a resource that the server must send because of a request.
pub const RESOURCE_COST: u64 = 256;
/// Cost of a name or version in a request, without its bytes.
pub const NAME_COST: u64 = 64;
/// Cost of each name that a stream holds or that waits to be sent. A request that changes the subscription
/// pays it.
pub const HELD_NAME_COST: u64 = 2;
/// Cost of one lookup. An authority needs one lookup for its domain, and one for each `*.suffix` of it.
pub const LOOKUP_COST: u64 = 32;

/// Limits that an operator may raise, and the number of times that clients reached each limit.
#[derive(Debug)]
pub struct Limits {
    /// Timeout of a client that reads nothing while data waits for it. The server then closes the connection.
    pub unread: Duration,
    /// Maximum number of streams per identity.
    pub identity_streams: usize,
    /// Like [`MAX_NAMES`], for all connections of one identity, in bytes.
    pub identity_names: usize,
    reached: [Reached; Bound::ALL.len()],
    identities: Mutex<HashMap<Arc<str>, Usage>>,
    memory: SharedMemory,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(Duration::from_secs(60), 10_000, 64 << 20)
    }
}

/// Limit that a client reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The connection owes too much, or both the identity and the instance do. The server pauses reading the
    /// connection.
    Pace,
    /// The client does not read the data that waits for it.
    Unread,
    /// A request is too long, or has too many fields.
    Request,
    /// A request waits for memory, or is not completed in time.
    Incomplete,
    /// The connection subscribes to too many names without a resource, or the name lists of the instance are
    /// too long.
    Names,
    /// The identity subscribes to too many names without a resource.
    IdentityNames,
    /// The identity has too many streams.
    IdentityStreams,
    /// The nonce of a request was never sent on its stream.
    Nonce,
}

impl Bound {
    /// All limits.
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

    /// Returns the label in metrics.
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

/// Number of times that clients reached a limit.
#[derive(Debug, Default)]
struct Reached {
    count: AtomicU64,
    /// Count and time of the last log line.
    logged: Mutex<Option<(u64, Instant)>>,
}

/// Minimum time between two log lines about one limit.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

impl Limits {
    /// Creates limits with these values; see the fields.
    pub fn new(unread: Duration, identity_streams: usize, identity_names: usize) -> Self {
        let (reached, identities, memory) = Default::default();
        Self { unread, identity_streams, identity_names, reached, identities, memory }
    }

    /// Returns the number of times that clients reached a limit.
    pub fn reached(&self, bound: Bound) -> u64 {
        self.reached[bound as usize].count.load(Relaxed)
    }

    /// Counts that `client` reached a limit. Logs it at most every ten seconds.
    pub(crate) fn record(&self, bound: Bound, client: &str) {
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
        warn!(bound = bound.label(), times = count - before, client, "a client reached a discovery limit");
    }

    /// Counts that a limit was reached, and returns the status that ends the call.
    pub(crate) fn exhausted(&self, bound: Bound, client: &str, what: impl Into<String>) -> Status {
        self.record(bound, client);
        Status::resource_exhausted(what)
    }
}

/// Returns the memory of a name that the server holds for one client alone, in bytes: the text, its
/// allocation, and its places in lists.
pub(crate) fn name_cost(name: &str) -> usize {
    64 + name.len()
}

/// Account that all calls of a connection share.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) limits: Arc<Limits>,
    /// Address of the client, for the log.
    pub(crate) client: String,
    pub(crate) pace: LeakyBucket,
    /// A call holds the connection's place for a small incomplete request.
    small: AtomicBool,
    waiting: AtomicUsize,
    /// Number of waits that have ended.
    waited: AtomicUsize,
    names: AtomicUsize,
    closing: AtomicBool,
    /// Bytes read from the client since the connection began.
    pub(crate) read: AtomicU64,
    /// Bytes written to the client.
    pub(crate) written: AtomicU64,
}

impl Account {
    pub(crate) fn new(limits: Arc<Limits>, client: String) -> Self {
        let (pace, small, waiting, waited, names, closing, read, written) = Default::default();
        Self { limits, client, pace, small, waiting, waited, names, closing, read, written }
    }

    /// Closes the connection, including its other calls.
    pub(crate) fn close(&self) {
        self.closing.store(true, Relaxed);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Returns the number of waits that have ended; `None` while a call waits. A waiting call does not read.
    /// This fills the connection's window and delays the other calls.
    pub(crate) fn waited(&self) -> Option<usize> {
        (self.waiting.load(Relaxed) == 0).then(|| self.waited.load(Relaxed))
    }
}

/// A call's wait for memory or for its pace; ends when dropped.
#[derive(Debug)]
pub(crate) struct Wait(Arc<Account>);

impl Wait {
    pub(crate) fn new(account: &Arc<Account>) -> Self {
        account.waiting.fetch_add(1, Relaxed);
        Self(Arc::clone(account))
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.0.waited.fetch_add(1, Relaxed);
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

/// Authenticated caller. The server verifies the identity before it reads the body of the call.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The identity, which all replicas of a workload share.
    pub name: Arc<str>,
    /// The workload instance to which the credential was issued, if the credential says so.
    pub instance: Option<Arc<str>>,
}

/// Returns the workload instance that makes a call: the one in its credential, else the client's address.
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
    /// The place that each connection has.
    Small(Arc<Account>),
    /// A place in the memory that connections share. It may still wait for the memory.
    Shared(Reservation),
}

impl Place {
    /// Returns a place for a request of this length.
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

/// Replaces a part of a sum, and returns the new sum.
fn exchange(sum: &AtomicUsize, part: &mut usize, now: usize) -> usize {
    let before = std::mem::replace(part, now);
    if now >= before {
        sum.fetch_add(now - before, Relaxed) + (now - before)
    } else {
        sum.fetch_sub(before - now, Relaxed) - (before - now)
    }
}

/// Usage of an identity.
#[derive(Debug, Default)]
struct Usage {
    streams: usize,
    names: usize,
    /// Debt of all its instances, including that of streams that have ended.
    pace: Arc<LeakyBucket>,
    /// Usage of each instance.
    instances: HashMap<Arc<str>, Arc<Instance>>,
}

/// Usage of a workload instance.
#[derive(Debug, Default)]
struct Instance {
    pace: LeakyBucket,
    /// Bytes of the lists of names in its streams.
    lists: AtomicUsize,
}

impl Usage {
    fn is_used(&self) -> bool {
        self.streams > 0 || !self.instances.is_empty() || self.pace.debt() > 0
    }

    /// Removes instances that have no calls and no debt.
    fn forget_instances(&mut self) {
        self.instances.retain(|_, instance| Arc::strong_count(instance) > 1 || instance.pace.debt() > 0);
    }
}

/// Number of identities, or of instances of an identity, above which those without calls and debt are removed.
const MANY: usize = 1_024;

fn is_time_to_forget(count: usize) -> bool {
    count >= MANY && count.is_power_of_two()
}

/// Identity and workload instance to which work is charged, besides the connection.
///
/// An identity that owes too much delays only its instances that also owe too much. One instance therefore
/// cannot delay the others. It gains nothing by opening more connections.
#[derive(Debug)]
pub(crate) struct CallerAccount {
    limits: Arc<Limits>,
    identity: Arc<str>,
    instance: Arc<str>,
    of_identity: Arc<LeakyBucket>,
    of_instance: Arc<Instance>,
}

impl CallerAccount {
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

    /// Charges work.
    pub(crate) fn charge(&self, units: u64) {
        self.of_identity.charge(units / IDENTITY_FACTOR);
        self.of_instance.pace.charge(units);
    }

    /// Returns the time until more work is allowed; `None` if it is allowed now.
    pub(crate) fn wait(&self) -> Option<Duration> {
        Some(self.of_identity.wait()?.min(self.of_instance.pace.wait()?))
    }
}

impl Drop for CallerAccount {
    fn drop(&mut self) {
        let mut identities = lock(&self.limits.identities);
        let Some(usage) = identities.get_mut(&self.identity) else { return };
        // One reference is in the map, the other one is this.
        if Arc::strong_count(&self.of_instance) == 2 && self.of_instance.pace.debt() == 0 {
            usage.instances.remove(&self.instance);
        }
        if !usage.is_used() {
            identities.remove(&self.identity);
        }
    }
}

/// A stream's share of the accounts of its connection and its identity; released when dropped.
#[derive(Debug)]
pub(crate) struct StreamAccount {
    account: Arc<Account>,
    caller: Arc<CallerAccount>,
    names: usize,
    lists: usize,
}

impl StreamAccount {
    /// Counts a new stream of an identity. Fails if the identity has too many.
    pub(crate) fn enter(account: Arc<Account>, caller: CallerAccount) -> Result<Self, Status> {
        let limits = &account.limits;
        let mut identities = lock(&limits.identities);
        let usage = identities.entry(Arc::clone(&caller.identity)).or_default();
        if usage.streams < limits.identity_streams {
            usage.streams += 1;
            drop(identities);
            caller.charge(CALL_COST);
            return Ok(Self { account, caller: Arc::new(caller), names: 0, lists: 0 });
        }
        let streams = usage.streams;
        drop(identities);
        let what = format!("{} has {streams} discovery streams, which is the limit", caller.identity);
        Err(limits.exhausted(Bound::IdentityStreams, &account.client, what))
    }

    /// Charges a request of this length, of which `free` bytes cost nothing. The connection has paid for all bytes;
    /// the identity and the instance have not.
    pub(crate) fn charge(&self, units: u64, bytes: usize, free: usize) {
        let free = free.min(bytes);
        self.account.pace.refund(free as u64);
        self.account.pace.charge(units);
        self.caller.charge(units + (bytes - free) as u64);
    }

    pub(crate) fn caller(&self) -> &Arc<CallerAccount> {
        &self.caller
    }

    /// Sets the memory for names that the server holds for this stream alone. Fails if the connection or the
    /// identity exceeds its limit.
    pub(crate) fn set_name_bytes(&mut self, names: usize) -> Result<(), Status> {
        if names == self.names {
            return Ok(());
        }
        let before = self.names;
        let limits = &self.account.limits;
        let of_connection = exchange(&self.account.names, &mut self.names, names);
        let of_identity = {
            let mut identities = lock(&limits.identities);
            let usage = identities.entry(Arc::clone(&self.caller.identity)).or_default();
            usage.names = usage.names - before + names;
            usage.names
        };
        let (bound, whose, max) = match () {
            () if of_connection > MAX_NAMES => (Bound::Names, "this connection", MAX_NAMES),
            () if of_identity > limits.identity_names => {
                (Bound::IdentityNames, &*self.caller.identity, limits.identity_names)
            }
            () => return Ok(()),
        };
        let what = format!("the subscribed names of {whose} that no resource has take more than {max} bytes");
        Err(limits.exhausted(bound, &self.account.client, what))
    }
}

impl StreamAccount {
    /// Sets the memory for the stream's lists of names. Fails if the streams of the instance exceed the
    /// limit.
    pub(crate) fn set_list_bytes(&mut self, bytes: usize) -> Result<(), Status> {
        if bytes == self.lists {
            return Ok(());
        }
        let all = exchange(&self.caller.of_instance.lists, &mut self.lists, bytes);
        if all <= MAX_INSTANCE_LISTS {
            return Ok(());
        }
        let what = format!(
            "the lists of names of this workload instance take {all} bytes; the limit is {MAX_INSTANCE_LISTS}"
        );
        Err(self.account.limits.exhausted(Bound::Names, &self.account.client, what))
    }

    /// Fails if the stream subscribes to too many virtual host names without a resource.
    pub(crate) fn check_authorities(&self, authorities: usize) -> Result<(), Status> {
        if authorities <= MAX_AUTHORITIES {
            return Ok(());
        }
        let what = format!(
            "the stream subscribes to {authorities} virtual host names that no resource has; the limit is {MAX_AUTHORITIES}"
        );
        Err(self.account.limits.exhausted(Bound::Names, &self.account.client, what))
    }
}

impl Drop for StreamAccount {
    fn drop(&mut self) {
        self.account.names.fetch_sub(self.names, Relaxed);
        self.caller.of_instance.lists.fetch_sub(self.lists, Relaxed);
        let mut identities = lock(&self.account.limits.identities);
        if let Some(usage) = identities.get_mut(&self.caller.identity) {
            usage.streams -= 1;
            usage.names -= self.names;
        }
    }
}

// Each operation under these locks leaves the data consistent, so a poisoned lock is still usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
