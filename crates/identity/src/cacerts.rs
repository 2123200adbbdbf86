//! Plugged-in authority: a directory with Istio's `cacerts` files, and their validation.
//!
//! `ca-cert.pem` and `ca-key.pem` sign. `cert-chain.pem` contains the certificates up to a root and is optional
//! where a root signs. `root-cert.pem` is the trust bundle: one root, or several while one replaces another.

use std::{fmt::Display, fs, io, path::Path, time::SystemTime};

use rcgen::{KeyPair, PublicKeyData as _};
use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;

use crate::{
    Authority, Error, csr,
    identity::{self, certificates},
};

/// Contents of the files in a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// `root-cert.pem`
    pub roots: String,
    /// `ca-cert.pem`
    pub certificate: String,
    /// `ca-key.pem`
    key: String,
    /// `cert-chain.pem`; empty if absent.
    chain: String,
}

impl Files {
    /// Returns whether the directory contains any file of a plugged-in authority. `root-cert.pem` does not count: a
    /// self-signed authority writes it too.
    pub fn are_in(folder: &Path) -> bool {
        ["ca-cert.pem", "ca-key.pem", "cert-chain.pem"].iter().any(|name| folder.join(name).exists())
    }

    /// Reads the files. While they are being replaced, they may belong to different authorities or be
    /// incomplete.
    ///
    /// # Errors
    /// A mandatory file is missing, or a file cannot be read.
    pub fn read(folder: &Path) -> Result<Self, Error> {
        Self::collect(|name| match fs::read_to_string(folder.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(problem(name, error)),
            Ok(text) => Ok(Some(text)),
        })
    }

    /// Returns the files that are the values of a Secret.
    ///
    /// # Errors
    /// A mandatory file is missing, or a file is no text.
    pub fn from_secret<'a>(value: impl Fn(&str) -> Option<&'a [u8]>) -> Result<Self, Error> {
        Self::collect(|name| value(name).map(|bytes| text(name, bytes)).transpose())
    }

    fn collect(read: impl Fn(&'static str) -> Result<Option<String>, Error>) -> Result<Self, Error> {
        let required = |name| read(name)?.ok_or_else(|| missing(name));
        let chain = read("cert-chain.pem")?.unwrap_or_default();
        let (roots, certificate) = (required("root-cert.pem")?, required("ca-cert.pem")?);
        Ok(Self { roots, certificate, key: required("ca-key.pem")?, chain })
    }

    /// Returns the authority of the files.
    ///
    /// # Errors
    /// A file is invalid, or the files do not belong together.
    pub fn authority(&self) -> Result<Authority, Error> {
        Authority::from_pem(&self.roots, &self.certificate, &self.key, &self.chain)
    }
}

/// Description of a root certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootInfo {
    /// Subject, such as `O=skysail, CN=mesh root 1f0c9a3e`.
    pub name: String,
    /// Serial number, hexadecimal.
    pub serial: String,
    /// End of validity.
    pub not_after: SystemTime,
    /// Newly signed certificates chain to this root.
    pub signs: bool,
}

/// Parsed contents of the files.
pub(crate) struct Parts {
    pub(crate) signer: CertificateDer<'static>,
    pub(crate) key: KeyPair,
    /// Certificates from the signing one up, without roots.
    pub(crate) intermediates: Vec<CertificateDer<'static>>,
    pub(crate) roots: Vec<CertificateDer<'static>>,
    pub(crate) described: Vec<RootInfo>,
    /// Validity of the whole chain.
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
}

/// Parses the files, and checks them as far as an error can name one file as the cause.
pub(crate) fn check(
    roots: &str,
    certificate: &str,
    key: &str,
    chain: &str,
    now: SystemTime,
) -> Result<Parts, Error> {
    let read = |file: &'static str, text: &str| {
        certificates(text.as_bytes(), file).map_err(|error| match error {
            Error::Pem { reason, .. } => problem(file, reason),
            other => other,
        })
    };
    let signers = read("ca-cert.pem", certificate)?;
    let [signer] = &signers[..] else {
        let wrong = "it contains several certificates; keep the one that signs and move those above it to cert-chain.pem";
        return Err(problem("ca-cert.pem", wrong));
    };
    let above = if chain.trim().is_empty() { Vec::new() } else { read("cert-chain.pem", chain)? };
    let roots = read("root-cert.pem", roots)?;
    let mut validity = check_authority("ca-cert.pem", signer, now)?;
    let mut intermediates: Vec<CertificateDer<'static>> = Vec::new();
    for certificate in std::iter::once(signer).chain(&above) {
        if roots.contains(certificate) || intermediates.contains(certificate) {
            continue;
        }
        let (from, until) = check_authority("cert-chain.pem", certificate, now)?;
        validity = (validity.0.max(from), validity.1.min(until));
        intermediates.push(certificate.clone());
    }
    let (mut ends, mut described) = (Vec::new(), Vec::new());
    for root in &roots {
        let parsed = parse("root-cert.pem", root)?;
        let signs = intermediates.iter().chain([signer]).any(|below| is_signed_by(below, &parsed));
        described.push(describe_root(&parsed, signs));
        // Other roots of the bundle may have expired; the root of the signing chain may not.
        if signs {
            ends.push(check_authority("root-cert.pem", root, now)?.1);
            let constraints = parsed.basic_constraints().ok().flatten();
            let below = constraints.and_then(|constraints| constraints.value.path_len_constraint);
            // Only some verifiers check the path length of a root.
            if below.is_some_and(|below| intermediates.len() > below as usize) {
                let wrong = format!(
                    "{} allows no CA certificate this far below it (path length constraint)",
                    parsed.subject()
                );
                return Err(problem("root-cert.pem", wrong));
            }
        }
    }
    let not_after = ends.into_iter().max().map_or(validity.1, |root| root.min(validity.1));
    let key = check_key(key, signer)?;
    let signer = signer.clone();
    Ok(Parts { signer, key, intermediates, roots, described, not_before: validity.0, not_after })
}

/// Checks that a certificate may sign others now; returns its validity.
fn check_authority(
    file: &'static str,
    certificate: &CertificateDer<'_>,
    now: SystemTime,
) -> Result<(SystemTime, SystemTime), Error> {
    let parsed = parse(file, certificate)?;
    let subject = parsed.subject();
    let constraints = parsed.basic_constraints().map_err(|error| problem(file, error))?;
    if !constraints.is_some_and(|constraints| constraints.value.ca) {
        let wrong = format!("{subject} is not a CA certificate: its basic constraints must contain CA:TRUE");
        return Err(problem(file, wrong));
    }
    let usage = parsed.key_usage().map_err(|error| problem(file, error))?;
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(problem(
            file,
            format!("{subject} may not sign certificates: its key usage lacks keyCertSign"),
        ));
    }
    csr::check_key(parsed.public_key()).map_err(|refusal| problem(file, format!("{subject}: {refusal}")))?;
    let validity = parsed.validity();
    let (from, until) = (identity::time(validity.not_before), identity::time(validity.not_after));
    if until <= now {
        return Err(problem(file, format!("{subject} expired at {}; replace it", validity.not_after)));
    }
    if from > now {
        let wrong = format!("{subject} is not valid before {}; is the clock right?", validity.not_before);
        return Err(problem(file, wrong));
    }
    Ok((from, until))
}

/// Describes a root.
pub(crate) fn describe_root(root: &X509Certificate<'_>, signs: bool) -> RootInfo {
    let not_after = identity::time(root.validity().not_after);
    RootInfo { name: root.subject().to_string(), serial: root.raw_serial_as_string(), not_after, signs }
}

fn check_key(pem: &str, signer: &CertificateDer<'_>) -> Result<KeyPair, Error> {
    let file = "ca-key.pem";
    let key = KeyPair::from_pem(pem).map_err(|error| {
        let wanted = "a PEM private key (PKCS #8, SEC 1 or PKCS #1) without a password: ECDSA P-256, P-384 or P-521, RSA or Ed25519";
        problem(file, format!("it is not {wanted}: {error}"))
    })?;
    let certified = parse("ca-cert.pem", signer)?;
    if key.der_bytes() != &*certified.public_key().subject_public_key.data {
        return Err(problem(
            file,
            "it is not the key of the certificate in ca-cert.pem; the two must be replaced together",
        ));
    }
    Ok(key)
}

fn parse<'a>(file: &'static str, certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, Error> {
    let parsed = x509_parser::parse_x509_certificate(certificate);
    parsed.map(|(_, parsed)| parsed).map_err(|error| problem(file, error))
}

/// Returns whether one certificate signed another. A root and its successor often have the same name.
fn is_signed_by(certificate: &CertificateDer<'_>, above: &X509Certificate<'_>) -> bool {
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else { return false };
    parsed.issuer().as_raw() == above.subject().as_raw()
        && csr::signed(
            certificate,
            parsed.tbs_certificate.as_ref(),
            &parsed.signature_value.data,
            above.public_key(),
        )
        .is_ok_and(|good| good)
}

/// Returns a value of a Secret as text.
pub(crate) fn text(name: &'static str, bytes: &[u8]) -> Result<String, Error> {
    String::from_utf8(bytes.to_owned()).map_err(|error| problem(name, error))
}

fn missing(name: &'static str) -> Error {
    problem(
        name,
        "there is no such file; a plugged-in authority has ca-cert.pem, ca-key.pem, root-cert.pem and, unless a root \
         signs, cert-chain.pem",
    )
}

/// Returns an error about one of the files.
pub(crate) fn problem(file: &'static str, problem: impl Display) -> Error {
    Error::Authority { file, problem: problem.to_string() }
}

#[cfg(test)]
mod tests;
