//! Fuzzes `skysail_fuzz::peer`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::peer(data));
