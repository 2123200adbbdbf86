//! Fuzzes `skysail_fuzz::jwt`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::jwt(data));
