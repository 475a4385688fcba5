// Scores of races, weights of residual draws and terms of the sums of rules, from the logit or the probabilities p and
// q of one token. F is a float or a vector of floats, as in core/elementary-inl.h.

// ln(weight / E) of a token that races with the unnormalised weight exp((z - maximum) scale)
template <typename F>
PASS_EXT_HOST_DEVICE F race_score(F z, float maximum_logit, float scale, F log_e) {
  return fused(z - constant(z, maximum_logit), constant(z, scale), constant(z, 0.0f) - log_e);
}

// (p - beta q)+: the rest of p after drafts from q were rejected
template <typename F>
PASS_EXT_HOST_DEVICE F residual_weight(F p, F q, float beta) {
  return maximum(fused(constant(p, -beta), q, p), constant(p, 0.0f));
}

// min(p / rho, q): the part of one draft that K-SEQ accepts
template <typename F>
PASS_EXT_HOST_DEVICE F kseq_overlap(F p, F q, float inverse_rho) {
  return minimum(p * constant(p, inverse_rho), q);
}

// (p - share min(p / rho, q))+: the rest of p when K-SEQ accepted no draft
template <typename F>
PASS_EXT_HOST_DEVICE F kseq_weight(F p, F q, float inverse_rho, float share) {
  return maximum(fused(constant(p, -share), kseq_overlap(p, q, inverse_rho), p), constant(p, 0.0f));
}
