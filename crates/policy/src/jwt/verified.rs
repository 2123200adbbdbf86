//! Tokens whose signature was verified before. A client usually sends a token many times, and a check of its signature
//! takes far longer than the rest of a request.
//!
//! Whether a signature is valid depends on the token and the keys alone. Times, issuers and audiences are checked for each
//! request. Forged tokens are not kept, so they take no memory.

use std::{cell::RefCell, sync::Arc};

use skysail_http::map::Map;

use super::Status;
use crate::config::jwt::KeySet;

/// Number of tokens after which the older half is dropped. A worker keeps at most twice as many.
const TOKENS: usize = 128;
/// Maximum length of a token that is kept in bytes, as in Envoy.
const MAX_LENGTH: usize = 4 << 10;

/// Tokens with the keys that verify their signature.
type Tokens = Map<Box<str>, Arc<KeySet>>;

thread_local! {
    /// The recent and the older tokens of a worker.
    static VERIFIED: RefCell<[Tokens; 2]> = RefCell::default();
}

/// Checks the signature of a token. `verify` is called unless these keys have verified the token before.
///
/// # Errors
/// That of `verify`.
pub(super) fn check(
    keys: &Arc<KeySet>,
    token: &str,
    verify: impl FnOnce() -> Result<(), Status>,
) -> Result<(), Status> {
    let is_known = VERIFIED.with_borrow_mut(|[recent, older]| {
        if let Some(known) = recent.get(token) {
            return Arc::ptr_eq(known, keys);
        }
        let Some((token, known)) = older.remove_entry(token) else { return false };
        let is_known = Arc::ptr_eq(&known, keys);
        recent.insert(token, known);
        is_known
    });
    if is_known {
        return Ok(());
    }
    verify()?;
    if token.len() <= MAX_LENGTH {
        VERIFIED.with_borrow_mut(|[recent, older]| {
            if recent.len() >= TOKENS {
                *older = std::mem::take(recent);
            }
            recent.insert(token.into(), Arc::clone(keys));
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a token; returns the result, and whether its signature was verified.
    fn checked(keys: &Arc<KeySet>, token: &str, result: Result<(), Status>) -> (Result<(), Status>, bool) {
        let mut verified = false;
        let checked = check(keys, token, || {
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
        VERIFIED.with_borrow(|[recent, older]| assert!(recent.len() + older.len() <= 2 * TOKENS + 1));
        let long = "x".repeat(MAX_LENGTH + 1);
        for _ in 0..2 {
            assert_eq!(checked(&keys, &long, Ok(())), (Ok(()), true));
        }
    }
}
