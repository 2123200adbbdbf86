//! A filter of the streams that a change may concern, so that a change does not wake thousands of other streams.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use xxhash_rust::xxh3::xxh3_64;

use crate::{kind::Kind, layer::Layer};

/// Number of words: 256 bits per type. With ten names in the filter, one in 170 other names matches by chance.
const WORDS: usize = 4;

/// Names that some streams subscribe to: a Bloom filter with two bits per name for each type. Names are only ever
/// added, because a false match costs a stream only one look at the snapshot.
///
/// No change is missed. A stream adds its names, then checks for a snapshot later than the one that it answers from.
/// The publisher queries the filter while no stream can read the snapshot.
#[derive(Debug, Default)]
pub struct Interest([[AtomicU64; WORDS]; Kind::ALL.len()]);

impl Interest {
    /// Adds all names of a type.
    pub fn add_all(&self, kind: Kind) {
        self.0[kind as usize].iter().for_each(|word| word.store(u64::MAX, Relaxed));
    }

    /// Adds names of a type.
    pub fn add<'a>(&self, kind: Kind, names: impl IntoIterator<Item = &'a str>) {
        let words = &self.0[kind as usize];
        for (word, bit) in names.into_iter().flat_map(bits) {
            // Most bits are set already. The load keeps the cache line shared between cores.
            if words[word].load(Relaxed) & bit == 0 {
                words[word].fetch_or(bit, Relaxed);
            }
        }
    }

    /// Returns false if a change concerns no stream of this filter.
    pub fn concerns(&self, change: &Change) -> bool {
        let has = |words: &[AtomicU64; WORDS], name: &Bits| {
            name.iter().all(|(word, bit)| words[*word].load(Relaxed) & bit != 0)
        };
        self.0.iter().zip(&change.0).any(|(words, change)| match change {
            ChangedNames::Some(names) => names.iter().any(|name| has(words, name)),
            ChangedNames::All => words.iter().any(|word| word.load(Relaxed) != 0),
        })
    }
}

/// Positions of the bits of a name.
type Bits = [(usize, u64); 2];

fn bits(name: &str) -> Bits {
    let hash = xxh3_64(name.as_bytes());
    let place = |hash: u64| ((hash >> 6) as usize % WORDS, 1 << (hash & 63));
    [place(hash), place(hash >> 32)]
}

/// Names that changed in a layer.
#[derive(Debug)]
pub struct Change([ChangedNames; Kind::ALL.len()]);

#[derive(Debug)]
enum ChangedNames {
    Some(Vec<Bits>),
    /// The names are not known.
    All,
}

impl Default for Change {
    /// Returns a change that concerns no stream.
    fn default() -> Self {
        Self(std::array::from_fn(|_| ChangedNames::Some(Vec::new())))
    }
}

impl Change {
    /// Returns a change that concerns every stream with a subscription.
    pub fn everything() -> Self {
        Self(std::array::from_fn(|_| ChangedNames::All))
    }

    /// Returns the changes after a generation.
    pub fn since(layer: &Layer, generation: u64) -> Self {
        Self(Kind::ALL.map(|kind| match layer.changed_names(kind, generation) {
            None => ChangedNames::All,
            // A name without a resource may resolve to a virtual host now.
            _ if layer.has_changed_aliases(kind, generation) => ChangedNames::All,
            Some(names) => {
                let both = names.flat_map(|name| [Some(name), kind.family(name)]);
                ChangedNames::Some(both.flatten().map(bits).collect())
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::resource::Resource;

    #[test]
    fn changes_concern_streams_that_subscribe_to_them() {
        let mut layer = Layer::default();
        let set = |layer: &mut Layer, generation, kind, name: &str, body: &'static [u8]| {
            layer.set(generation, Resource::from_body(kind, name, Bytes::from_static(body)));
        };
        for number in 0..1_000 {
            set(&mut layer, 1, Kind::Endpoint, &format!("outbound|80||service-{number}"), b"1");
        }
        let asks = |kind: Kind, names: &[&str]| {
            let interest = Interest::default();
            interest.add(kind, names.iter().copied());
            interest
        };
        let one = asks(Kind::Endpoint, &["outbound|80||service-7", "outbound|80||not-yet"]);
        let (all, none) = (Interest::default(), Interest::default());
        all.add_all(Kind::Endpoint);

        let mut concerned = 0;
        for number in 0..1_000 {
            let generation = 2 + number;
            set(&mut layer, generation, Kind::Endpoint, &format!("outbound|80||service-{number}"), b"2");
            let change = Change::since(&layer, generation - 1);
            assert!(all.concerns(&change) && !none.concerns(&change));
            assert!(number != 7 || one.concerns(&change));
            concerned += usize::from(one.concerns(&change));
        }
        assert!(concerned < 5, "{concerned} of 1000 changes match a filter of two names");
        set(&mut layer, 2_000, Kind::Endpoint, "outbound|80||not-yet", b"1");
        assert!(one.concerns(&Change::since(&layer, 1_999)));
        layer.remove(2_001, Kind::Endpoint, "outbound|80||service-7");
        assert!(one.concerns(&Change::since(&layer, 2_000)));

        // The filter separates types, and matches a virtual host by its route configuration.
        assert!(!asks(Kind::Cluster, &["outbound|80||service-7"]).concerns(&Change::since(&layer, 2_000)));
        set(&mut layer, 2_002, Kind::VirtualHost, "80/a:80", b"1");
        assert!(asks(Kind::VirtualHost, &["80"]).concerns(&Change::since(&layer, 2_001)));
        assert!(!asks(Kind::VirtualHost, &["81"]).concerns(&Change::since(&layer, 2_001)));

        // A change whose names are not known concerns every stream with a subscription.
        assert!(one.concerns(&Change::everything()) && !none.concerns(&Change::everything()));
        for generation in 2_003..5_000 {
            let body = if generation % 2 == 0 { b"1" } else { b"2" };
            set(&mut layer, generation, Kind::Endpoint, "outbound|80||service-1", body);
        }
        assert!(one.concerns(&Change::since(&layer, 2_003)));
    }
}
