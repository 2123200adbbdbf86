//! Nonces that nobody can guess: a client that has one has read the response.
//!
//! A nonce is a response's number on its stream and a keyed hash of that, `7-0123456789abcdef`, so that nothing is kept for it.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// SipHash with 128 bits of the system's random numbers, which is a pseudorandom function of what it hashes.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
static STREAMS: AtomicU64 = AtomicU64::new(0);

/// A request's nonce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Nonce {
    /// There is none.
    #[default]
    None,
    /// That of the stream's response of this number.
    Of(u64),
    /// One that the stream was never sent.
    Unknown,
}

/// The nonces of one stream.
#[derive(Debug)]
pub(super) struct Nonces {
    stream: u64,
}

impl Nonces {
    pub(super) fn new() -> Self {
        Self { stream: STREAMS.fetch_add(1, Relaxed) }
    }

    /// The nonce of a response.
    pub(super) fn text(&self, number: u64) -> String {
        format!("{number}-{:016x}", KEY.hash_one((self.stream, number)))
    }

    /// What a request's nonce stands for.
    pub(super) fn read(&self, text: &str) -> Nonce {
        if text.is_empty() {
            return Nonce::None;
        }
        let number = text.split_once('-').and_then(|(number, _)| number.parse().ok());
        number.filter(|number| self.text(*number) == text).map_or(Nonce::Unknown, Nonce::Of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sent_is_known() {
        let (nonces, others) = (Nonces::new(), Nonces::new());
        let seventh = nonces.text(7);
        assert_eq!(nonces.read(&seventh), Nonce::Of(7));
        assert_eq!(nonces.read(""), Nonce::None);
        let hash = seventh.strip_prefix("7-").unwrap();
        let guesses =
            ["7".into(), "7-".into(), "7-0000000000000000".into(), format!("8-{hash}"), format!("07-{hash}")];
        for guess in guesses.into_iter().chain([others.text(7), seventh.to_uppercase() + "x"]) {
            assert_eq!(nonces.read(&guess), Nonce::Unknown, "{guess}");
        }
    }
}
