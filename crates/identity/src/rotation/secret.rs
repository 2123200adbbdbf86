//! Form of a self-signed authority in a Secret of a cluster, which istiod can share.
//!
//! | key | value |
//! |---|---|
//! | `ca-cert.pem`, `ca-key.pem` | the signing root and its key, as istiod stores and reads them |
//! | `root-cert.pem` | the trust bundle |
//! | `authority.json` | the state of the rotation |
//!
//! The first two keys decide. Without a state, or with that of another key, the root is taken over: it signs, and no
//! rotation is in progress.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use super::{Lifetimes, STATE, SelfSigned, State, Step};
use crate::{Error, authority::Root, cacerts};

/// Name of the Secret, as in Istio.
pub const NAME: &str = "istio-ca-secret";
/// Type of the Secret, as in Istio.
pub const KIND: &str = "istio.io/ca-root";
/// Default lifetime of the certificates that istiod signs.
const ISTIO_LIFETIME: Duration = Duration::from_secs(24 * 3600);

impl SelfSigned {
    /// Returns the authority of a Secret with these values, and whether the Secret holds its state.
    ///
    /// # Errors
    /// The lifetimes are inconsistent. A key is missing, the state is invalid, or the root cannot sign.
    pub fn from_secret<'a>(
        value: impl Fn(&str) -> Option<&'a [u8]>,
        lifetimes: Lifetimes,
        now: SystemTime,
    ) -> Result<(Self, bool), Error> {
        lifetimes.check()?;
        let text = |name| value(name).map(|bytes| cacerts::text(name, bytes)).transpose();
        let required = |name| {
            let missing = "the Secret has no such key; it needs ca-cert.pem (the root that signs) and ca-key.pem (its key)";
            text(name)?.ok_or_else(|| cacerts::problem(name, missing))
        };
        let root = Root::new(&required("ca-cert.pem")?, &required("ca-key.pem")?);
        let stored = text(STATE)?.map(|text| State::parse(&text)).transpose()?;
        let state = match &stored {
            Some(state) if state.signing == root => state.clone(),
            Some(state) if state.signing.has_key_of(&root) => state.with_certificate(root, now)?,
            _ => State::taken_over(root, lifetimes.certificate, now)?,
        };
        let is_stored = stored.as_ref() == Some(&state);
        let authority = Self { root_lifetime: lifetimes.root, state };
        if !is_stored {
            // The caller stores it. What cannot sign is not stored.
            authority.authority()?;
        }
        Ok((authority, is_stored))
    }

    /// Returns the values of the Secret.
    ///
    /// # Errors
    /// None in practice: every state can be encoded.
    pub fn to_secret(&self) -> Result<BTreeMap<String, String>, Error> {
        let Root { certificate, key } = self.state.signing.clone();
        Ok([
            ("ca-cert.pem", certificate),
            ("ca-key.pem", key),
            ("root-cert.pem", self.roots_pem()),
            (STATE, self.to_text()?),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into())
    }
}

impl State {
    /// Returns the state of a root that another program has made. Certificates that istiod signed may be alive.
    fn taken_over(root: Root, lifetime: Duration, now: SystemTime) -> Result<Self, Error> {
        Ok(Self { longer_until: now + ISTIO_LIFETIME, ..Self::settled(root, lifetime, now)? })
    }

    /// Returns this state after istiod has renewed the certificate of the signing root. Both certificates have the same
    /// key and name, so each verifies what the other signed.
    fn with_certificate(&self, root: Root, now: SystemTime) -> Result<Self, Error> {
        let longer_until = self.longer_until;
        match self.step {
            Step::Settled => Ok(Self { longer_until, ..Self::settled(root, self.lifetime, now)? }),
            _ => Ok(Self { signing: root, ..self.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    use super::*;

    const LIFETIMES: Lifetimes =
        Lifetimes { certificate: Duration::from_secs(3600), root: Duration::from_secs(1000 * 3600) };

    type Values = BTreeMap<String, String>;

    fn read(values: &Values) -> Result<(SelfSigned, bool), Error> {
        SelfSigned::from_secret(|key| values.get(key).map(String::as_bytes), LIFETIMES, SystemTime::now())
    }

    /// Returns the values of a Secret of istiod with this key.
    fn of_istiod(key: &KeyPair) -> Values {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_before = (SystemTime::now() - LIFETIMES.certificate).into();
        params.not_after = (SystemTime::now() + LIFETIMES.root).into();
        let certificate = params.self_signed(key).unwrap().pem();
        let keys = ["ca-cert.pem", "ca-key.pem", "cert-chain.pem", "key.pem", "root-cert.pem"];
        let values = [&*certificate, &key.serialize_pem(), "", "", &certificate];
        keys.map(str::to_owned).into_iter().zip(values.map(str::to_owned)).collect()
    }

    #[test]
    fn a_secret_has_what_it_was_given() {
        let created = SelfSigned::create(LIFETIMES, SystemTime::now()).unwrap();
        let rotated = created.rotated(SystemTime::now()).unwrap().unwrap();
        let issued = rotated.advanced(rotated.until()).unwrap().unwrap();
        for authority in [created, rotated, issued] {
            let values = authority.to_secret().unwrap();
            assert!(read(&values).unwrap() == (authority.clone(), true));
            assert!(
                values["root-cert.pem"].starts_with(&values["ca-cert.pem"]),
                "the root that signs is the first"
            );
        }
    }

    #[test]
    fn a_root_of_istiod_is_taken_over() {
        let values = of_istiod(&KeyPair::generate().unwrap());
        let (mut authority, is_stored) = read(&values).unwrap();
        assert!(!is_stored && authority.step() == Step::Settled);
        assert!(authority.roots_pem() == values["ca-cert.pem"]);
        // Certificates that istiod has signed may be alive.
        authority = authority.rotated(SystemTime::now()).unwrap().unwrap();
        assert!(authority.until() > SystemTime::now() + 23 * LIFETIMES.certificate);
        authority.authority().unwrap();
    }

    #[test]
    fn the_keys_of_istio_decide() {
        let key = KeyPair::generate().unwrap();
        let (authority, _) = read(&of_istiod(&key)).unwrap();
        let rotated = authority.rotated(SystemTime::now()).unwrap().unwrap();
        let mut values = rotated.to_secret().unwrap();
        assert!(read(&values).unwrap().1);
        // istiod renews the certificate of the key: the rotation continues.
        values.extend(of_istiod(&key));
        let (renewed, is_stored) = read(&values).unwrap();
        assert!(!is_stored && renewed.step() == Step::Distribute && renewed.until() == rotated.until());
        assert_ne!(renewed.roots_pem(), rotated.roots_pem());
        assert_eq!(renewed.authority().unwrap().described().len(), 2);
        // Another authority ends the rotation.
        values.extend(of_istiod(&KeyPair::generate().unwrap()));
        let (replaced, is_stored) = read(&values).unwrap();
        assert!(
            !is_stored && replaced.step() == Step::Settled && replaced.roots_pem() == values["ca-cert.pem"]
        );
    }

    #[test]
    fn invalid_values_are_refused() {
        let rotated = SelfSigned::create(LIFETIMES, SystemTime::now()).unwrap().rotated(SystemTime::now());
        let good = rotated.unwrap().unwrap().to_secret().unwrap();
        let with = |key: &str, value: &str| {
            let mut values = good.clone();
            values.insert(key.to_owned(), value.to_owned());
            values
        };
        let state = &good[STATE];
        for (values, words) in [
            (with(STATE, &state[..state.len() / 2]), "authority.json: it cannot be read: "),
            (with(STATE, &state.replace("distribute", "issue")), "step issue lacks the other root"),
            (with(STATE, &state.replace("3600", "18446744073709551615")), "at most 200 years"),
            (with("ca-cert.pem", ""), "it holds no certificate"),
        ] {
            let error = read(&values).err().unwrap().to_string();
            assert!(error.contains(words), "{error}");
        }
        let mut missing = good.clone();
        missing.remove("ca-key.pem");
        assert!(
            read(&missing).err().unwrap().to_string().starts_with("ca-key.pem: the Secret has no such key")
        );
    }
}
