"""Links move the bytes of announced chunks between one prefill and one decode worker, in order."""
