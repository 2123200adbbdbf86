//! What may differ from istiod, and why. `docs/compatibility.md` says the same to users.

/// One difference.
pub(crate) struct Allowed {
    /// The recording it occurs in.
    pub(crate) scenario: &'static str,
    /// Part of the difference as the test prints it.
    pub(crate) part: &'static str,
    /// Why it is so; here for the reader.
    #[expect(dead_code, reason = "for the reader")]
    pub(crate) reason: &'static str,
}

/// All of them.
pub(crate) const ALLOWED: &[Allowed] = &[];
