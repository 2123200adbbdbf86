//! Nonces that cannot be guessed: a client that sends one has read the response.
//!
//! A nonce is the number of a response on its stream, and a keyed hash of it (`7-0123456789abcdef`). The server
//! stores nothing per nonce.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::{
    digits::{Decimal, hex},
    wire::NonceText,
};

/// SipHash with a 128-bit random key from the system; a pseudorandom function.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
static STREAMS: AtomicU64 = AtomicU64::new(0);

/// Nonce of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Nonce {
    /// The request carries no nonce.
    #[default]
    None,
    /// Nonce of the response with this number on the stream.
    Of(u64),
    /// Nonce that was never sent on the stream.
    Unknown,
}

/// Nonces of one stream.
#[derive(Debug)]
pub(super) struct Nonces {
    stream: u64,
}

impl Nonces {
    pub(super) fn new() -> Self {
        Self { stream: STREAMS.fetch_add(1, Relaxed) }
    }

    /// Returns the nonce of a response.
    pub(super) fn text(&self, number: u64) -> NonceText {
        NonceText::of(&[Decimal::new(number).as_bytes(), b"-", &hex(KEY.hash_one((self.stream, number)))])
    }

    /// Parses the nonce of a request.
    pub(super) fn read(&self, text: &str) -> Nonce {
        if text.is_empty() {
            return Nonce::None;
        }
        let number = text.split_once('-').and_then(|(number, _)| number.parse().ok());
        number.filter(|number| &*self.text(*number) == text.as_bytes()).map_or(Nonce::Unknown, Nonce::Of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sent_nonces_are_accepted() {
        let (nonces, others) = (Nonces::new(), Nonces::new());
        let text = |nonces: &Nonces, number| String::from_utf8(nonces.text(number).to_vec()).unwrap();
        let seventh = text(&nonces, 7);
        assert_eq!(nonces.read(&seventh), Nonce::Of(7));
        assert_eq!(nonces.read(""), Nonce::None);
        let hash = seventh.strip_prefix("7-").unwrap();
        let guesses =
            ["7".into(), "7-".into(), "7-0000000000000000".into(), format!("8-{hash}"), format!("07-{hash}")];
        for guess in guesses.into_iter().chain([text(&others, 7), seventh.to_uppercase() + "x"]) {
            assert_eq!(nonces.read(&guess), Nonce::Unknown, "{guess}");
        }
    }
}
