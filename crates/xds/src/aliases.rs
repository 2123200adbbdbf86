//! Aliases: names by which virtual hosts are found (`ROUTE CONFIGURATION/DOMAIN`), and their changes.
//!
//! An alias is stored as a key: a hash, and for a wildcard (`80/*.suffix`) the length of its suffix. A lookup hashes
//! only the suffixes of an authority whose length a wildcard has. An authority of a hundred labels therefore costs
//! about as much as one of three.

use std::{collections::VecDeque, sync::Arc};

use xxhash_rust::xxh3::xxh3_64;

use crate::{kind::Kind, work};

/// Maximum number of remembered changes. A stream that has not seen an older one resolves all its names again.
const REMEMBERED: usize = 2_048;

/// Bit that marks the key of a wildcard.
const WILDCARD: u64 = 1 << 63;
/// First bit of the suffix length in the key of a wildcard, and the maximum length that fits.
const LENGTH_SHIFT: u32 = 54;
const MAX_SUFFIX_LENGTH: usize = 511;

/// Maximum length of an authority by which a virtual host is found, in bytes: the longest domain name with a port.
const MAX_AUTHORITY: usize = 253 + 6;
/// Maximum length of a name with such an authority, in bytes.
const MAX_NAME: usize = 1 << 10;
/// Number of dots in the longest domain name that ends in a dot.
const MAX_DOTS: usize = 127;

/// Returns the key of an alias.
pub(crate) fn key(alias: &str) -> u64 {
    let start = alias.rfind('/').map_or(0, |slash| slash + 1);
    match alias.as_bytes().get(start..) {
        Some([b'*', suffix @ ..]) if suffix.first() == Some(&b'.') => {
            wildcard(alias.as_bytes(), suffix.len())
        }
        _ => xxh3_64(alias.as_bytes()) >> 1,
    }
}

/// Returns the key of a wildcard whose suffix has this length.
fn wildcard(alias: &[u8], suffix: usize) -> u64 {
    let hash = xxh3_64(alias) & ((1 << LENGTH_SHIFT) - 1);
    WILDCARD | (suffix.min(MAX_SUFFIX_LENGTH) as u64) << LENGTH_SHIFT | hash
}

/// Set of suffix lengths, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lengths([u64; (MAX_SUFFIX_LENGTH + 1) / 64]);

impl Lengths {
    fn of(keys: impl Iterator<Item = u64>) -> Self {
        let mut lengths = Self::default();
        for key in keys.filter(|key| key & WILDCARD != 0) {
            let length = (key >> LENGTH_SHIFT) as usize & MAX_SUFFIX_LENGTH;
            lengths.0[length / 64] |= 1 << (length % 64);
        }
        lengths
    }

    fn has(&self, length: usize) -> bool {
        self.0.get(length / 64).is_some_and(|word| word & 1 << (length % 64) != 0)
    }

    fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the position of the authority in a name, if it can find a virtual host.
fn authority_at(kind: Kind, name: &str) -> Option<usize> {
    if kind != Kind::VirtualHost || name.len() > MAX_NAME {
        return None;
    }
    let start = name.rfind('/')? + 1;
    let authority = name.get(start..)?;
    let dots = authority.bytes().filter(|byte| *byte == b'.').count();
    (authority.len() <= MAX_AUTHORITY && dots <= MAX_DOTS).then_some(start)
}

/// Returns the maximum number of lookups for a name that no resource has.
pub(crate) fn lookups(kind: Kind, name: &str) -> usize {
    let authority = authority_at(kind, name).and_then(|start| name.get(start..));
    authority.map_or(0, |authority| 1 + authority.matches('.').count())
}

/// Looks for an alias that a name matches: the name itself, then each `*.suffix` whose length is in `lengths`, the
/// longest first.
fn find_first<T>(
    kind: Kind,
    name: &str,
    lengths: &Lengths,
    mut look: impl FnMut(u64) -> Option<T>,
) -> Option<T> {
    let start = authority_at(kind, name)?;
    work::count(1);
    let found = look(key(name));
    if found.is_some() || lengths.is_empty() {
        return found;
    }
    let (family, authority) = name.split_at(start);
    // `ROUTE CONFIGURATION/*` is written in front of each suffix, over bytes that are no longer needed.
    let mut text = [b"*", name.as_bytes()].concat();
    let suffixes = authority.match_indices('.').map(|(dot, _)| (dot, authority.len() - dot));
    suffixes.filter(|(_, length)| lengths.has(*length)).find_map(|(dot, length)| {
        work::count(1);
        text.get_mut(dot..dot + start)?.copy_from_slice(family.as_bytes());
        *text.get_mut(dot + start)? = b'*';
        look(wildcard(text.get(dot..)?, length))
    })
}

/// All aliases of a type.
#[derive(Clone, Debug)]
pub(crate) struct AliasIndex {
    /// Sorted keys with the names of the resources.
    names: Arc<[(u64, Arc<str>)]>,
    lengths: Lengths,
}

impl FromIterator<(u64, Arc<str>)> for AliasIndex {
    fn from_iter<I: IntoIterator<Item = (u64, Arc<str>)>>(all: I) -> Self {
        let mut names: Vec<_> = all.into_iter().collect();
        names.sort_unstable();
        Self { lengths: Lengths::of(names.iter().map(|(key, _)| *key)), names: names.into() }
    }
}

impl AliasIndex {
    /// Returns the name of the resource that a name matches in two indexes. Of the second, only resources that `keep`
    /// selects count. If several have the alias, the first by name wins.
    pub(crate) fn find<'a>(
        [first, second]: [&'a Self; 2],
        kind: Kind,
        name: &str,
        keep: impl Fn(&Arc<str>) -> bool,
    ) -> Option<&'a Arc<str>> {
        find_first(kind, name, &first.lengths.or(second.lengths), |key| {
            let of_second = second.names_of(key).find(|name| keep(name));
            first.names_of(key).next().into_iter().chain(of_second).min()
        })
    }

    /// Returns the names of the resources with an alias, sorted.
    fn names_of(&self, key: u64) -> impl Iterator<Item = &Arc<str>> {
        let first = self.names.partition_point(|(known, _)| *known < key);
        let same = self.names.get(first..).into_iter().flatten().take_while(move |(known, _)| *known == key);
        same.map(|(_, name)| name)
    }
}

/// The latest changes of aliases.
#[derive(Clone, Debug, Default)]
pub(crate) struct AliasLog {
    /// Generations and the keys of aliases that were added or removed in them, the oldest first.
    changes: VecDeque<(u64, u64)>,
    /// Generation up to which changes are forgotten.
    forgotten: u64,
}

impl AliasLog {
    /// Records aliases that were added or removed.
    pub(crate) fn note(&mut self, generation: u64, keys: impl IntoIterator<Item = u64>) {
        for key in keys {
            self.changes.push_back((generation, key));
            if self.changes.len() > REMEMBERED
                && let Some((generation, _)) = self.changes.pop_front()
            {
                self.forgotten = generation;
            }
        }
    }

    /// Returns a log that has forgotten the changes of two logs.
    pub(crate) fn forget(one: &Self, other: &Self) -> Self {
        Self { changes: VecDeque::new(), forgotten: one.last().max(other.last()) }
    }

    /// Returns the generation of the last change.
    pub(crate) fn last(&self) -> u64 {
        self.changes.back().map_or(self.forgotten, |(generation, _)| *generation)
    }

    /// Returns the keys that changed after a generation; `None` if some are forgotten.
    pub(crate) fn since(&self, generation: u64) -> Option<impl Iterator<Item = u64>> {
        let first = self.changes.partition_point(|(of, _)| *of <= generation);
        let keys = self.changes.range(first..).map(|(_, key)| *key);
        (generation >= self.forgotten).then_some(keys)
    }
}

/// Aliases that were added or removed.
#[derive(Debug)]
pub(crate) struct ChangedAliases {
    /// Sorted keys.
    keys: Vec<u64>,
    lengths: Lengths,
}

impl FromIterator<u64> for ChangedAliases {
    fn from_iter<I: IntoIterator<Item = u64>>(keys: I) -> Self {
        let mut keys: Vec<_> = keys.into_iter().collect();
        keys.sort_unstable();
        keys.dedup();
        Self { lengths: Lengths::of(keys.iter().copied()), keys }
    }
}

impl ChangedAliases {
    /// Returns true if one of these sorted keys of names is among the changes, or if any wildcard is: the keys of names
    /// do not show which wildcards match.
    pub(crate) fn may_affect(&self, names: &[u64]) -> bool {
        work::count(self.keys.len().min(names.len()));
        let (few, many) =
            if names.len() < self.keys.len() { (names, &*self.keys) } else { (&*self.keys, names) };
        !self.lengths.is_empty() || few.iter().any(|key| many.binary_search(key).is_ok())
    }

    /// Returns true if a name may resolve differently than before.
    pub(crate) fn affects(&self, kind: Kind, name: &str) -> bool {
        find_first(kind, name, &self.lengths, |key| self.keys.binary_search(&key).ok()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_wildcard_is_in_its_key() {
        let length = |alias: &str| {
            let lengths = Lengths::of([key(alias)].into_iter());
            (0..=MAX_SUFFIX_LENGTH).filter(|length| lengths.has(*length)).collect::<Vec<_>>()
        };
        assert_eq!(length("80/*.b"), [2]);
        assert_eq!(length(&format!("80/*.{}", "b".repeat(258))), [259]);
        assert_eq!(length(&format!("80/*.{}", "b".repeat(4_000))), [MAX_SUFFIX_LENGTH]);
        for exact in ["80/b", "80/*", "80/x.*.b", "80/*b.c", "*.b/80", ""] {
            assert_eq!(length(exact), [0_usize; 0], "{exact}");
        }
        assert_eq!(key("80/*.b"), wildcard(b"80/*.b", 2), "however it is written");
    }

    #[test]
    fn changes_are_remembered_up_to_a_limit() {
        let mut log = AliasLog::default();
        log.note(1, [key("80/a")]);
        log.note(2, [key("80/*.b"), key("80/c")]);
        let changed: ChangedAliases = log.since(1).unwrap().collect();
        let affects = |name| changed.affects(Kind::VirtualHost, name);
        assert!(affects("80/c") && affects("80/x.y.b") && affects("80/*.b"));
        assert!(!affects("80/a") && !affects("80/b") && !affects("81/x.b") && !affects("80/x.y.c"));
        assert_eq!(log.last(), 2);
        log.note(3, (0..REMEMBERED as u64 - 2).map(|key| key + 10));
        assert!(log.since(0).is_none() && log.since(1).is_some());
        log.note(4, [7]);
        assert!(log.since(1).is_none(), "a part of generation 2 is forgotten");
        assert_eq!(log.since(2).unwrap().count(), REMEMBERED - 1);
        assert_eq!(log.since(4).unwrap().count(), 0);
    }
}
