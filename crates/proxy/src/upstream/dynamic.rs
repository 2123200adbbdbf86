//! Dynamic forward proxy: the host of each request or the SNI of each connection is resolved by DNS.
//!
//! As in Envoy, clusters and filters that name the same cache share it, across workers. A cache is bounded: when it is
//! full, it drops hosts without a request for `host_ttl`, and refuses further hosts if it is still full. Source:
//! `envoy.extensions.common.dynamic_forward_proxy.v3.DnsCacheConfig`.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;

use skysail_http::timer;
use skysail_policy::{
    config::cluster::HostCacheConfig,
    error::{Error, Kind},
    route,
};

/// Maximum length of a host name (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;
/// Time until the next lookup after a failed one. The previous addresses stay in use.
const FAILED_REFRESH: Duration = Duration::from_secs(5);
/// Limits concurrent lookups, because each occupies a thread.
static LOOKUPS: Semaphore = Semaphore::const_new(32);

/// Addresses of the hosts that requests have named.
pub(crate) struct HostCache {
    config: HostCacheConfig,
    hosts: Mutex<HashMap<String, Arc<CachedHost>>>,
    /// Requests that wait for a lookup.
    pending: AtomicU32,
}

struct CachedHost {
    found: Mutex<Found>,
    /// Held during a lookup.
    lookup: tokio::sync::Mutex<()>,
}

struct Found {
    /// Empty before the first lookup.
    addresses: Arc<[SocketAddr]>,
    /// Time of the next lookup.
    until: Instant,
    used: Instant,
}

impl HostCache {
    /// Returns the cache of this name and configuration.
    pub(crate) fn shared(config: &HostCacheConfig) -> Arc<Self> {
        type Caches = Vec<Weak<HostCache>>;
        static CACHES: LazyLock<Mutex<Caches>> = LazyLock::new(Mutex::default);
        let mut caches = lock(&CACHES);
        caches.retain(|cache| cache.strong_count() > 0);
        let mut known = caches.iter().filter_map(Weak::upgrade);
        if let Some(cache) = known.find(|cache| cache.config == *config) {
            return cache;
        }
        let cache =
            Arc::new(Self { config: config.clone(), hosts: Mutex::default(), pending: AtomicU32::new(0) });
        caches.push(Arc::downgrade(&cache));
        cache
    }

    /// Returns the addresses of a host, which may contain a port.
    ///
    /// # Errors
    /// The host is not valid or has no address, the cache is full, or too many requests wait for lookups.
    pub(crate) async fn resolve(&self, authority: &str, port: u16) -> Result<Arc<[SocketAddr]>, Error> {
        let host = route::without_port(authority);
        let port = match authority[host.len()..].strip_prefix(':') {
            Some(text) if !text.is_empty() => text.parse().map_err(|_| failed("the port is not valid"))?,
            _ => port,
        };
        let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = plain.parse::<IpAddr>() {
            return Ok([SocketAddr::new(ip, port)].into());
        }
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if host.is_empty() || host.len() > MAX_NAME || !host.bytes().all(is_allowed) {
            return Err(failed("the host is not a DNS name"));
        }
        let key = format!("{}:{port}", host.to_ascii_lowercase());
        let cached = self.host(&key)?;
        if let Some(found) = cached.fresh() {
            return Ok(found);
        }
        let _pending = Pending::begin(self)?;
        let result = self.look_up(&cached, host, port).await;
        if result.is_err() {
            // Names without addresses must not fill the cache.
            let mut hosts = lock(&self.hosts);
            if hosts.get(&key).is_some_and(|known| lock(&known.found).addresses.is_empty()) {
                hosts.remove(&key);
            }
        }
        result
    }

    /// Returns the entry of a host, and creates it if necessary.
    fn host(&self, key: &str) -> Result<Arc<CachedHost>, Error> {
        let now = Instant::now();
        let mut hosts = lock(&self.hosts);
        if let Some(known) = hosts.get(key) {
            lock(&known.found).used = now;
            return Ok(Arc::clone(known));
        }
        let is_full = |hosts: &HashMap<_, _>| hosts.len() >= self.config.max_hosts as usize;
        if is_full(&hosts) {
            hosts.retain(|_, known| now.duration_since(lock(&known.found).used) < self.config.host_ttl);
        }
        if is_full(&hosts) {
            return Err(Error::new(Kind::DnsCacheOverflow));
        }
        let found = Found { addresses: Arc::default(), until: now, used: now };
        let new = Arc::new(CachedHost { found: Mutex::new(found), lookup: tokio::sync::Mutex::default() });
        hosts.insert(key.to_owned(), Arc::clone(&new));
        Ok(new)
    }

    /// Looks a host up, unless another request has just done it.
    async fn look_up(&self, cached: &CachedHost, host: &str, port: u16) -> Result<Arc<[SocketAddr]>, Error> {
        let _lookup = cached.lookup.lock().await;
        if let Some(found) = cached.fresh() {
            return Ok(found);
        }
        let answer = async {
            let _permit = LOOKUPS.acquire().await;
            tokio::net::lookup_host((host, port)).await
        };
        let (addresses, cause) = match timer::timeout(self.config.query_timeout, answer).await {
            Some(Ok(addresses)) => (self.config.family.of(addresses.collect()), "no address".to_owned()),
            Some(Err(error)) => (Vec::new(), error.to_string()),
            None => (Vec::new(), "no answer in time".to_owned()),
        };
        let mut found = lock(&cached.found);
        if !addresses.is_empty() {
            let mut addresses = addresses;
            addresses.dedup();
            found.addresses = addresses.into();
            found.until = Instant::now() + self.config.refresh;
        } else if found.addresses.is_empty() {
            tracing::debug!(host, cause, "not found");
            return Err(failed(&cause));
        } else {
            found.until = Instant::now() + FAILED_REFRESH;
        }
        Ok(Arc::clone(&found.addresses))
    }
}

impl CachedHost {
    /// Returns the addresses if they are current.
    fn fresh(&self) -> Option<Arc<[SocketAddr]>> {
        let found = lock(&self.found);
        (!found.addresses.is_empty() && Instant::now() < found.until).then(|| Arc::clone(&found.addresses))
    }
}

/// A request that waits for a lookup.
struct Pending<'a>(&'a HostCache);

impl<'a> Pending<'a> {
    fn begin(cache: &'a HostCache) -> Result<Self, Error> {
        let more = |count| (count < cache.config.max_pending).then_some(count + 1);
        match cache.pending.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => Ok(Self(cache)),
            Err(_) => Err(Error::new(Kind::DnsPendingOverflow)),
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Relaxed);
    }
}

fn failed(cause: &str) -> Error {
    Error::caused(Kind::DnsFailed, cause)
}

/// Locks a mutex whose data stay consistent if a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use skysail_policy::config::cluster::Family;

    use super::*;

    fn config(name: &str) -> HostCacheConfig {
        HostCacheConfig {
            name: name.into(),
            family: Family::V4,
            refresh: Duration::from_secs(60),
            host_ttl: Duration::from_secs(300),
            max_hosts: 1,
            query_timeout: Duration::from_secs(5),
            max_pending: 10,
        }
    }

    #[tokio::test]
    async fn a_full_cache_refuses_other_hosts() {
        let cache = HostCache::shared(&config("full"));
        let found = cache.resolve("localhost:81", 80).await.unwrap();
        assert_eq!(*found, [SocketAddr::from(([127, 0, 0, 1], 81))]);
        assert_eq!(cache.resolve("LOCALHOST:81", 80).await.unwrap(), found);
        assert_eq!(cache.resolve("localhost", 80).await.unwrap_err().kind, Kind::DnsCacheOverflow);
        // Addresses need no place in the cache.
        let address = cache.resolve("[::1]", 80).await.unwrap();
        assert_eq!(*address, ["[::1]:80".parse().unwrap()]);
        assert_eq!(*cache.resolve("1.2.3.4:5", 80).await.unwrap(), ["1.2.3.4:5".parse().unwrap()]);
    }

    #[tokio::test]
    async fn hosts_that_are_not_found_leave_the_cache() {
        let cache = HostCache::shared(&config("missing"));
        for host in ["a.invalid", "", "a b", "a/b", "a:99999", &"a".repeat(300)] {
            assert_eq!(cache.resolve(host, 80).await.unwrap_err().kind, Kind::DnsFailed, "{host}");
        }
        cache.resolve("localhost", 80).await.unwrap();
    }

    #[tokio::test]
    async fn unused_hosts_are_dropped_and_waiting_requests_are_limited() {
        let mut config = config("bounded");
        config.host_ttl = Duration::ZERO;
        let cache = HostCache::shared(&config);
        cache.resolve("localhost:1", 80).await.unwrap();
        cache.resolve("localhost:2", 80).await.unwrap();
        assert_eq!(lock(&cache.hosts).len(), 1);
        assert!(Arc::ptr_eq(&cache, &HostCache::shared(&config)));
        config.max_pending = 0;
        let none = HostCache::shared(&config);
        assert_eq!(none.resolve("localhost", 80).await.unwrap_err().kind, Kind::DnsPendingOverflow);
    }
}
