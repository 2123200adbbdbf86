//! A JSON Web Token, and the key set with which a sidecar verifies it.

use std::time::Duration;

use anyhow::Context as _;
use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use serde_json::json;
use skysail_identity::{Issuer, ServiceAccount};

/// Audience of the token.
pub(crate) const AUDIENCE: &str = "skysail-bench";
/// Subject of the token.
pub(crate) const SUBJECT: &str = "system:serviceaccount:default:user";
/// Length of a coordinate of P-256 in bytes.
const COORDINATE: usize = 32;
/// Lifetime of the token, longer than any run.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// A token of a user.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    /// The token itself, as after `Bearer`.
    pub(crate) text: String,
    /// JSON Web Key Set with its key (RFC 7517).
    pub(crate) keys: String,
}

impl Token {
    /// Issues a token with a new key.
    pub(crate) fn issue() -> anyhow::Result<Self> {
        let issuer = Issuer::generate()?;
        let account = ServiceAccount { namespace: "default".into(), name: "user".into(), pod: None };
        let text = issuer.issue(&account, AUDIENCE, LIFETIME)?;
        let lines = issuer.public_pem().lines().filter(|line| !line.starts_with("-----"));
        let key = STANDARD.decode(lines.collect::<String>())?;
        // The key ends with its point: both coordinates (RFC 5480, section 2.2).
        let (rest, y) = key.split_last_chunk::<COORDINATE>().context("the key is too short")?;
        let (_, x) = rest.split_last_chunk::<COORDINATE>().context("the key is too short")?;
        let [x, y] = [x, y].map(|coordinate| URL_SAFE_NO_PAD.encode(coordinate));
        let keys = json!({ "keys": [{ "kty": "EC", "crv": "P-256", "alg": "ES256", "x": x, "y": y }] });
        Ok(Self { text, keys: keys.to_string() })
    }
}
