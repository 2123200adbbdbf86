//! Tokens and signatures that were verified before: those of a worker's tokens, and those of one request's tokens.
//!
//! A client usually sends a token many times. A check of its signature takes far longer than the rest of a request. Its
//! parsing takes about as long as the rest. Whether a signature is valid depends on the token and the keys alone. Times, issuers and audiences are checked for each
//! request. Forged tokens are not kept, so they take no memory.

use std::{
    cell::RefCell,
    hash::{BuildHasher as _, RandomState},
    rc::Rc,
    sync::{Arc, LazyLock},
};

use serde_json::Value;
use skysail_http::map::Map;

use super::{Status, Token};
use crate::config::jwt::KeySet;

/// Number of tokens after which the older half is dropped. A worker keeps at most twice as many.
const TOKENS: usize = 128;
/// Maximum length of a token that is kept in bytes, as in Envoy.
const MAX_LENGTH: usize = 4 << 10;
/// Maximum number of values in the header and the claims of a token that is kept.
const MAX_VALUES: usize = 256;

/// A parsed token, and the keys that have verified its signature.
#[derive(Debug)]
pub(super) struct KnownToken {
    pub(super) token: Arc<Token>,
    keys: Arc<KeySet>,
}

/// Tokens by their texts.
type Tokens = Map<Box<str>, Rc<KnownToken>>;

thread_local! {
    /// The recent and the older tokens of a worker.
    static VERIFIED: RefCell<[Tokens; 2]> = RefCell::default();
}

/// Returns a token whose signature was verified before, maybe with other keys.
pub(super) fn known(text: &str) -> Option<Rc<KnownToken>> {
    VERIFIED.with_borrow_mut(|[recent, older]| {
        if let Some(known) = recent.get(text) {
            return Some(Rc::clone(known));
        }
        let (text, known) = older.remove_entry(text)?;
        insert(recent, older, text, Rc::clone(&known));
        Some(known)
    })
}

/// Adds a token to the recent ones. If there are too many, they become the older ones, and the former older ones are
/// dropped.
fn insert(recent: &mut Tokens, older: &mut Tokens, text: Box<str>, token: Rc<KnownToken>) {
    if recent.len() >= TOKENS {
        *older = std::mem::take(recent);
    }
    recent.insert(text, token);
}

/// Returns the number of values in a value, itself included.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(values).sum::<usize>(),
        Value::Object(fields) => fields.values().map(values).sum(),
        _ => 0,
    }
}

/// Checks the signature of a token. `verify` is called unless these keys have verified it, as `known` says.
///
/// # Errors
/// That of `verify`.
pub(super) fn check(
    known: Option<&KnownToken>,
    keys: &Arc<KeySet>,
    (token, text): (&Arc<Token>, &str),
    verify: impl FnOnce() -> Result<(), Status>,
) -> Result<(), Status> {
    if known.is_some_and(|known| Arc::ptr_eq(&known.keys, keys)) {
        return Ok(());
    }
    verify()?;
    if text.len() <= MAX_LENGTH && values(&token.header) + values(&token.claims) <= MAX_VALUES {
        VERIFIED.with_borrow_mut(|[recent, older]| {
            let known = KnownToken { token: Arc::clone(token), keys: Arc::clone(keys) };
            insert(recent, older, text.into(), Rc::new(known));
        });
    }
    Ok(())
}

/// Results of signature checks for one request's tokens. Each is verified once per configuration.
#[derive(Debug, Default)]
pub struct Signatures(RefCell<Vec<(u64, Result<(), Status>)>>);

impl Signatures {
    /// Maximum number of entries. A request rarely has more than one token.
    const MAX: usize = 8;

    /// Checks a signature. `verify` is called unless this configuration, provider and token have an entry.
    pub(super) fn check(
        &self,
        of: (u64, usize, &str),
        verify: impl FnOnce() -> Result<(), Status>,
    ) -> Result<(), Status> {
        static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let of = KEYS.hash_one(of);
        if let Some((_, known)) = self.0.borrow().iter().find(|(other, _)| *other == of) {
            return *known;
        }
        let found = verify();
        let mut known = self.0.borrow_mut();
        if known.len() == Self::MAX {
            known.clear();
        }
        known.push((of, found));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a token; returns the result, and whether its signature was verified.
    fn checked(keys: &Arc<KeySet>, text: &str, result: Result<(), Status>) -> (Result<(), Status>, bool) {
        let mut verified = false;
        let known = known(text);
        let new = || Arc::new(Token::parse("eyJhbGciOiJFUzI1NiJ9.e30.AA").unwrap());
        let token = known.as_ref().map_or_else(new, |known| Arc::clone(&known.token));
        let checked = check(known.as_deref(), keys, (&token, text), || {
            verified = true;
            result
        });
        (checked, verified)
    }

    #[test]
    fn a_valid_signature_is_verified_once_for_its_keys() {
        let (keys, others) = (Arc::new(KeySet(Vec::new())), Arc::new(KeySet(Vec::new())));
        assert_eq!(checked(&keys, "a", Ok(())), (Ok(()), true));
        assert_eq!(checked(&keys, "a", Err(Status::Forged)), (Ok(()), false));
        assert_eq!(checked(&others, "a", Err(Status::Forged)), (Err(Status::Forged), true));
        for _ in 0..2 {
            assert_eq!(checked(&keys, "b", Err(Status::Forged)), (Err(Status::Forged), true));
        }
    }

    #[test]
    fn the_number_and_length_of_kept_tokens_are_limited() {
        let keys = Arc::new(KeySet(Vec::new()));
        for number in 0..10 * TOKENS {
            assert_eq!(checked(&keys, &number.to_string(), Ok(())), (Ok(()), true));
            // A token that is used stays.
            assert_eq!(checked(&keys, "used", Ok(())), (Ok(()), number == 0));
        }
        let is_bounded =
            || VERIFIED.with_borrow(|[recent, older]| recent.len() <= TOKENS && older.len() <= TOKENS);
        assert!(is_bounded());
        // Also if all of them are used between two that are new.
        for new in 0..3 {
            let all: Vec<Box<str>> =
                VERIFIED.with_borrow(|tokens| tokens.iter().flat_map(|some| some.keys().cloned()).collect());
            all.iter().for_each(|text| _ = known(text));
            assert!(is_bounded());
            assert_eq!(checked(&keys, &format!("new {new}"), Ok(())), (Ok(()), true));
        }
        let long = "x".repeat(MAX_LENGTH + 1);
        for _ in 0..2 {
            assert_eq!(checked(&keys, &long, Ok(())), (Ok(()), true));
        }
    }

    #[test]
    fn each_signature_is_verified_once() {
        let (known, verified) = (Signatures::default(), std::cell::Cell::new(0));
        let check = |of, good: bool| {
            known.check(of, || {
                verified.set(verified.get() + 1);
                if good { Ok(()) } else { Err(Status::BadSignature) }
            })
        };
        for _ in 0..3 {
            assert_eq!(check((1, 0, "a"), true), Ok(()));
            assert_eq!(check((1, 0, "b"), false), Err(Status::BadSignature));
        }
        assert_eq!(verified.get(), 2);
        // Another configuration or provider verifies again.
        for of in [(2, 0, "a"), (1, 1, "a")] {
            assert_eq!(check(of, false), Err(Status::BadSignature));
        }
        assert_eq!(verified.get(), 4);
        // The number of entries is limited.
        for index in 0..100 {
            assert_eq!(check((3, index, "a"), true), Ok(()));
        }
        assert!(known.0.borrow().len() <= Signatures::MAX);
    }
}
